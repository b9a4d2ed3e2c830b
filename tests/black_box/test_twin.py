"""What a lossy exchange does to the loss, from outside: two trainings side by side, on paper, as JSON and drawn."""

import json
import re
import warnings

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary import Choice, Link, Topology
from armillary.cli.main import app
from armillary.codecs.codec import build_codec
from armillary.exchanges.coded import coded
from armillary.exchanges.exchange import build_row, dense_exchange
from armillary.reference.replicas import Replicas
from armillary.reference.rows import Meanings
from contracts.journey import registered

PAGE = 100
SLOW = Link(1e-4, 1e5)  # 0.8 Mbit/s
FOUR = Topology(4, 1, SLOW, SLOW, 1 << 40)

WORKLOAD = '''
"""A regression that a few steps learn."""
import torch
from torch import nn
class Workload:
    name, unit, steps, batch_size = "line", "samples", 4, 8
    def model(self): return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def batches(self, split, worker, workers, seed):
        draw = torch.Generator().manual_seed(seed * 1000 + worker + (split == "train") * 7)
        for _ in range(200 if split == "train" else 4):
            inputs = torch.randn(8, 16, generator=draw)
            yield inputs, inputs[:, :1].sin()
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()
    def samples(self, batch): return 8
    def evaluate(self, model, batch): return {}
    def report(self, totals): return {}
def workload(**options): return Workload()
'''


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Runs the command in a folder with a workload; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(WORKLOAD)

    def run(*arguments):
        done = CliRunner().invoke(app, ["twin", *(str(argument) for argument in arguments)])
        return done.exit_code, done.stdout, done.stderr

    return run


def script(steps=12, workers=4):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    draw = torch.Generator().manual_seed(4)
    inputs = [torch.randn(8, 16, generator=draw) for _ in range(steps * workers + 8)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [(x, x[:, :1].sin()) for x in inputs]


def square(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def twin_of(text, steps=12, seeds=2, topology=FOUR, **more):
    model, optimizer, batches = script(steps)
    wished = {"*": Choice.parse(text)}
    return armillary.twin(
        model, optimizer, batches, square, topology=topology, constraints=wished, steps=steps, seeds=seeds, **more
    )


def test_exact_beside_exact_has_a_gap_of_0_exactly_at_equal_steps_and_seconds():
    found = twin_of("all_reduce")
    facts, text = found.facts(), str(found)
    assert facts["exact"] == facts["twin"] and facts["departing"] is None
    assert {row["gap"] for row in facts["gap_at_steps"] + facts["gap_at_seconds"]} == {0.0}
    assert facts["crossings_seconds"] == [] and "gap 0 (spread 0)" in text and "the gap is 0 throughout" in text


def test_a_bad_codec_shows_a_gap_and_says_so_in_words():
    """Planted: every gradient is sent with the wrong sign."""
    good = build_codec("lower_precision", dtype="bfloat16")

    def turned_round():
        bad = good._replace(encode=lambda values, draw: good.encode(-values, draw))
        return coded(bad, wire="gathered", feedback=False)

    with registered(dense_exchange(departs=("lossy",), costs="signs are turned round"), turned_round):
        found = twin_of("turned_round", steps=20)
    last = found.sides.at_steps[-1]
    assert last.gap > 3 * last.spread > 0 and last.other > found.sides.at_steps[0].other
    assert f"gap +{last.gap:.2g}" in str(found) and "behind (higher loss) throughout" in str(found)


def test_a_lossy_exchange_is_shown_beside_its_seconds_and_bytes_and_counted():
    found, facts = (one := twin_of("quantize(bits=8)")), one.facts()
    assert facts["departing"]["counted_bytes"] == facts["departing"]["forecast_bytes"] > 0
    assert 0 < facts["twin"]["step_seconds"] < facts["exact"]["step_seconds"]
    assert facts["exact"]["losses"] != facts["twin"]["losses"] and len(facts["twin"]["losses"]) == 2
    assert "lossy: NOT exact" in str(found) and "counted" in str(found)
    assert all(len(line) <= PAGE for line in str(found).splitlines())


def test_what_the_data_decide_is_counted_beside_its_forecast():
    sent = twin_of("threshold(sparsity=0.9, small=0)", seeds=1).facts()["departing"]
    assert sent["counted_bytes"] != sent["forecast_bytes"] and sent["counted_bytes"] > 0


def test_a_twin_takes_the_same_steps_as_the_workers_of_a_job_would():
    """Beside the plain truth: mean gradients of all workers' batches, one step."""
    found = twin_of("all_reduce", steps=3, seeds=1)
    model, optimizer, batches = script(3)
    for step in range(3):
        optimizer.zero_grad()
        for batch in batches[4 * step : 4 * step + 4]:
            (square(model, batch) / 4).backward()
        optimizer.step()
    with torch.no_grad():
        want = sum(float(square(model, batch)) for batch in batches[-8:]) / 8
    assert found.sides.exact.losses[0][-1] == pytest.approx(want, rel=1e-5)


def test_a_script_is_left_as_it_was():
    model, optimizer, batches = script()
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    armillary.twin(model, optimizer, batches, square, topology=FOUR, constraints={"*": "one_bit"}, steps=2, seeds=1)
    assert torch.equal(torch.get_rng_state(), state) and not optimizer.state
    assert all(torch.equal(mine, was) for mine, was in zip(model.parameters(), before))
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_a_table_may_go_by_row_exactly_while_the_rest_is_coded():
    batches = [word_batch(number, 0) for number in range(4 * 4 + 8)]
    model = made(Reader)
    found = armillary.twin(
        model, OPTIMIZERS["sgd"](model.parameters()), batches, word_loss, topology=FOUR,
        constraints={"*": Choice.parse("quantize(bits=2, tile=8)"), "words.weight": "owned_rows"}, steps=4, seeds=1,
    )  # fmt: skip
    assert found.sides.other.name == "quantize(bits=2, tile=8)" and "owned_rows" in found.sides.exact.name


def rows_twin(text, steps=5):
    model, batches = made(Reader), [word_batch(number, 0) for number in range(steps * 4 + 8)]
    return armillary.twin(
        model, OPTIMIZERS["sgd"](model.parameters()), batches, word_loss, topology=FOUR,
        constraints={"words.weight": Choice.parse(text)}, steps=steps, seeds=1,
    )  # fmt: skip


def test_rows_in_code_are_trained_as_their_code_has_them():
    """Against replicas that read what the codec means; coarser codes are further from exact."""
    found = rows_twin(text := "owned_rows(rows_as=quantize(bits=4), gradients_as=quantize(bits=8))")
    exact, coded = (side.losses[0] for side in (found.sides.exact, found.sides.other))
    codes = build_row("owned_rows", **Choice.parse(text).options).codes
    meanings = {"words.weight": Meanings(codes.rows.meaning, codes.gradients.meaning)}
    truth = Replicas(made(Reader), lambda net: OPTIMIZERS["sgd"](net.parameters()), 4, (), rows=meanings)
    for step in range(5):
        truth.step([word_batch(4 * step + worker, 0) for worker in range(4)], word_loss)
    judged = truth.models[0].eval()
    with torch.no_grad():
        want = sum(float(word_loss(judged, word_batch(number, 0))) for number in range(20, 28)) / 8
    assert coded[-1] == pytest.approx(want, rel=1e-6) and coded[-1] != exact[-1]
    said = " ".join(str(found).split())
    assert "lossy: NOT exact" in said and "rows of words.weight are read in code; their bytes are forecast" in said
    assert found.sides.other.name == text and found.facts()["departing"] is None


def test_rows_as_they_are_have_a_gap_of_0_exactly():
    found = rows_twin("owned_rows")
    assert found.sides.exact.losses == found.sides.other.losses


REFUSED = {
    "only one worker": ({"topology": FOUR.of(1)}, "with 1 worker nothing crosses"),
    "no step": ({"steps": 0}, "want at least 1 of steps, got 0"),
    "no seed": ({"seeds": 0}, "want at least 1 of seeds, got 0"),
    "too few batches": ({"steps": 13}, "batches gave 56; 13 steps of 4 workers and 8 batches held out take 60"),
    "nothing asked": ({"constraints": {}}, "nothing is asked to differ"),
    "no such parameter": ({"constraints": {"emb.*": "one_bit"}}, "'emb.*' names no parameter"),
    "no such exchange": ({"constraints": {"*": "quantise"}}, "no exchange"),
    "another departure": ({"allow": ("local",)}, "allow is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_the_first_step(case):
    model, optimizer, batches = script()
    wished, why = REFUSED[case]
    steps = []
    asked = {"topology": FOUR, "constraints": {"*": "one_bit"}, "steps": 12, "seeds": 1, **wished}
    with pytest.raises(ValueError, match=re.escape(why)):
        armillary.twin(model, optimizer, batches, square, told=steps.append, **asked)
    assert steps == []


def test_a_loss_that_writes_into_its_batch_is_named():
    model, optimizer, batches = script()

    def careless(model, batch):
        return (model(batch[0].mul_(0.5)) - batch[1]).square().mean()

    with pytest.raises(RuntimeError, match="the loss of this script writes into its batch"):
        armillary.twin(model, optimizer, batches, careless, topology=FOUR, constraints={"*": "one_bit"}, steps=2)


def test_a_training_that_blows_up_is_said_to_and_is_null_in_json():
    model, optimizer, batches = script()
    optimizer.param_groups[0]["lr"] = 1e30
    asked = {"topology": FOUR, "constraints": {"*": "one_bit"}, "steps": 9, "seeds": 1}
    found = armillary.twin(model, optimizer, batches, square, **asked)
    said = " ".join(str(found).split())
    assert re.search(r"NOT finite: by all_reduce the loss is (nan|inf) after step \d, seed 0", said)
    assert json.loads(json.dumps(found.facts()))["exact"]["losses"][0][-1] is None


def test_the_command_prints_a_page_and_writes_losses_and_a_picture(told, tmp_path):
    code, out, err = told("line.py", "--exchange", "quantize(bits=4)=*", "--steps", 6, "--seeds", 2, "--gbit", 0.001)
    assert code == 0, err
    said = " ".join(out.split())
    assert "line.py: quantize(bits=4)=*; 4 workers, 6 steps, 2 seeds" in said
    assert "held-out loss at equal steps" in said and "at equal seconds the twin is" in said
    assert all(len(line) <= PAGE for line in out.splitlines()) and "written: twin.json, twin.png" in out
    kept = json.loads((tmp_path / "twin.json").read_text())
    assert len(kept["twin"]["losses"]) == 2 and (tmp_path / "twin.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_goes_on_after_the_seeds_it_has_and_refuses_another_training(told, tmp_path):
    asked = ("line.py", "--exchange", "one_bit=*", "--steps", 4)
    assert told(*asked, "--seeds", 1)[0] == 0
    first = json.loads((tmp_path / "twin.json").read_text())["twin"]["losses"][0]
    code, out, err = told(*asked, "--seeds", 2, "--resume", "--json")
    assert code == 0 and "seed 1 of 2" not in err
    assert json.loads(out)["twin"]["losses"][0] == first and json.loads(out)["seeds"] == 2
    code, _, err = told("line.py", "--exchange", "one_bit=*", "--steps", 5, "--resume")
    assert code == 2 and "drop --resume" in err and "4 steps" in err
    assert told(*asked, "--resume", "--out", "empty")[0] == 2


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("line.py",), "nothing is asked to differ"),
        (("line.py", "--exchange", "one_bit"), "want CHOICE=PATTERN"),
        (("line.py", "--exchange", "one_bit=*", "--workers", "1"), "with 1 worker"),
        (("nowhere.py", "--exchange", "one_bit=*"), "no file nowhere.py"),
        (("line.py", "--exchange", "one_bit=*", "--topology", "none.json"), "none.json"),
        (("line.py", "--exchange", "one_bit=head.*"), "'head.*' names no parameter"),
    ],
)
def test_the_command_refuses_in_one_line(told, asked, why):
    code, out, err = told(*asked)
    assert (code, out) == (2, "") and why in err, err


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("armillary.session.pictures.find_spec", lambda name: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        files = twin_of("one_bit", steps=2, seeds=1).save(tmp_path)
    assert [path.name for path in files] == ["twin.json"] and "not drawn" in str(seen[0].message)
