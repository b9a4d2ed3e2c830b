"""Rows of a table, and their gradients, in fewer bytes on the way: what a user names, reads in the plan, and gets."""

import re
from contextlib import contextmanager, nullcontext

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss

import face
from armillary import Choice, Plan
from armillary.cli.names import find, small
from armillary.codecs import RowCode, row_code
from armillary.planning.request import PlanRequest
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from armillary.tables.table import RowTable

TABLE, STEPS = "words.weight", 6
CODED = "owned_rows(rows_as=quantize(bits=8), gradients_as=quantize(bits=4))"


def words_plan(exchange, workers=2, dtype=torch.float64, **asked):
    batches = [word_batch(worker, step) for step in range(STEPS) for worker in range(workers)]
    named = {pattern: Choice.parse(text) for pattern, text in exchange.items()}
    request = {pattern: choice if choice.options else choice.name for pattern, choice in named.items()}
    return face.plan_for(made(Reader, dtype), word_loss, batches, workers, exchange=request, **asked)


def test_a_plan_says_that_it_is_not_exact_and_counts_the_codes():
    exact, coded = words_plan({TABLE: "owned_rows"}), words_plan({TABLE: CODED})
    assert exact.departures == () and coded.departures == coded.group_of(TABLE).departures == ("lossy",)
    assert coded.group_of(TABLE).layout == "row_sharded" and Plan.from_json(coded.to_json()) == coded
    said = " ".join(str(coded).split())
    assert f"NOT exact: {CODED}: rows are rounded or thinned where they travel; what a code leaves out is lost" in said
    assert face.sent_bytes_planned(coded) < 0.75 * face.sent_bytes_planned(exact)
    lazy = words_plan({TABLE: CODED}, lazy=[TABLE])
    assert lazy.departures == ("lazy", "lossy")


REFUSED = {
    "owned_rows(rows_as=threshold(sparsity=0.9))": "rows_as=threshold.*how long its code is the data decide",
    "owned_rows(gradients_as=random_k(keep=0.5))": "gradients_as=random_k.*it draws by lot",
    "owned_rows(gradients_as=hadamard(random_k(keep=0.5)))": "it draws by lot",
    "owned_rows(rows_as=low_rank(rank=2))": "no codec 'low_rank'.*rows keep no state",
    "owned_rows(rows_as=quantise)": "no codec 'quantise'.*did you mean 'quantize'",
    "owned_rows(rows_as=3)": "rows_as=3.*want a codec",
    "owned_rows(rows_as=quantize(bits=3))": "rows_as=quantize.bits=3.: codec: quantize knows 8, 4 and 2 bits",
    "owned_rows(rows_as=one_bit(tile=8, bits=1))": "rows_as=one_bit.*refuses options",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_write_a_row_is_refused_by_name(text):
    with pytest.raises(ValueError, match=REFUSED[text]):
        words_plan({TABLE: text})


@pytest.mark.parametrize(
    "asked",
    [
        {TABLE: "owned_rows(quantize(bits=8))"},
        {TABLE: "owned_rows_by_node(rows_as=quantize(bits=8))"},
        {TABLE: "gather_rows(quantize(bits=8))"},
        {"words*": "quantize(bits=8, wire=gathered)", "*.weight": "row_sharded"},
    ],
    ids=str,
)
def test_a_codec_beside_rows_is_refused_with_a_remedy_that_works(asked):
    with pytest.raises(ValueError, match=r"refuses options|want one") as refused:
        words_plan(asked)
    (remedy,) = re.findall(r"owned_rows\(rows_as=.*?\)\)", str(refused.value))
    assert words_plan({TABLE: remedy}).group_of(TABLE).exchange == Choice.parse(remedy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["quantize(bits=8)", "one_bit(tile=8)", "top_k(keep=0.25)", "hadamard(quantize(bits=4))"]
)
def test_a_row_alone_is_coded_as_it_is_among_others(name, dtype):
    """And none is none; the bytes of a single row stand behind an odd number of others."""
    code, rows = row_code("rows_as", Choice.parse(name)), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    rows = rows.to(dtype)
    whole = code.decode(code.encode(rows), rows)
    for few in (rows[:0], rows[:1], rows[:2]):
        assert torch.equal(code.decode(code.encode(few), few), whole[: len(few)])
    assert torch.equal(code.decode(code.encode(rows)[2:], rows), whole[2:])


def test_rows_that_no_code_makes_shorter_and_replicas_of_stages_are_refused():
    with pytest.raises(ValueError, match="a row has 8 bytes, and 9 in the code of its rows; leave that option out"):
        words_plan({TABLE: "owned_rows(rows_as=lower_precision)"}, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="schedule gpipe keeps tables whole, so words"):
        words_plan({TABLE: CODED}, 4, schedule="gpipe(micro_batches=2, stages=2)")


def trained(rank, workers, plan, folder, dtype):
    """Bytes of every step; what differs when the second half is taken once more, from a checkpoint."""
    sent, found = [], []
    for path in (None, folder):
        model = made(Reader, dtype)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        run = face.start(plan, model, optimizer, word_loss)
        if path:
            face.load(run, face.latest_checkpoint(path))
        for step in range(STEPS // 2 if path else 0, STEPS):
            face.step(run, [word_batch(rank, step)])
            if not path:
                sent.append(face.count_bytes(run))
                if step == STEPS // 2 - 1:
                    face.save(run, folder)
                    face.count_bytes(run)
        found.append(face.weights(run))
        face.close(run)
    return sent, [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


def test_a_run_sends_what_the_plan_says_and_is_resumed_bit_for_bit(crew, tmp_path):
    plan = words_plan({TABLE: CODED}, dtype=torch.float32)
    answers = crew(2).run(trained, plan, tmp_path, torch.float32)
    assert [apart for _, apart in answers] == [[], []]
    mean = sum(sum(sent) for sent, _ in answers) / 2 / STEPS
    assert mean == pytest.approx(face.sent_bytes_planned(plan), rel=0.05)  # whose rows are read, it knows on average


@contextmanager
def coded_by(wrong):
    """wrong(codec's own encode, RowCode, rows)."""
    encode = RowCode.encode
    RowCode.encode = lambda self, rows: wrong(encode, self, rows)
    yield
    RowCode.encode = encode


def too_large(encode, code, rows):
    return encode(code, rows * 2 if code.codec else rows)


def twice(encode, code, rows):
    """What is sent was coded before."""
    return encode(code, code.decode(encode(code, rows + rows.abs() / 3), rows) if code.codec else rows)


def of_its_neighbour(encode, code, rows):
    return encode(code, rows.roll(1, 0) if code.codec else rows)


@contextmanager
def left_behind():
    """Of several look-ups of a table in one step the last one's gradients count alone."""
    take = RowTable.take_gradients

    def taken(self, scale):
        gradients, routes = take(self, scale)
        return [0 * one for one in gradients[:-1]] + gradients[-1:], routes

    RowTable.take_gradients = taken
    yield
    RowTable.take_gradients = take


PLANTS = {
    "too large": lambda: coded_by(too_large),
    "coded twice": lambda: coded_by(twice),
    "the code of another row": lambda: coded_by(of_its_neighbour),
    "one look-up's gradients are left behind": left_behind,
}


def verified(rank, workers, plants):
    torch.set_num_threads(1)
    wished = dict.fromkeys(("embedding.weight", "output"), Choice.parse(CODED))
    request = JobRequest(PlanRequest(constraints=wished))
    found = []
    for plant in (PLANTS.get(name, nullcontext) for name in plants):
        with plant():
            task = find("language_model", small("language_model"))
            found.append(verify_workload(task, steps=2, exchanges=(), request=request))
    return found


def test_verify_holds_it_to_a_process_that_codes_at_the_same_places_and_finds_what_is_planted(crew):
    (found,), planted = crew(3).run(verified, [""])[0], crew(2).run(verified, [*PLANTS])[0]
    assert found.is_equal and not found.idle, str(found)
    assert {"rows looked up, coded", "rows with gradients, coded"} <= {one.mechanism for one in found.acted}
    assert f"NOT exact, held to its own oracle instead of one process: {CODED}" in " ".join(str(found).split())
    tables = {one.parameter for one in found.differences if one.departs}
    assert tables == {"embedding.weight", "output"}
    for name, one in zip(PLANTS, planted, strict=True):
        assert not one.is_equal, name
