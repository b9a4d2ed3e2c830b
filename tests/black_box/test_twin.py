"""What a lossy exchange does to the loss, from outside: two trainings side by side, on paper, as JSON and drawn."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary import Choice, Link, Topology
from armillary.cli.main import app
from armillary.codecs import build_codec, codec
from armillary.exchanges import build_dense, build_row, dense_exchange
from armillary.exchanges.coded import coded
from armillary.reference.edges import Edges
from armillary.reference.replicas import Replicas
from armillary.reference.serial import Crossing, Meanings
from armillary.reference.versions import Reference, WorkersReference
from armillary.schedules import Edge, codes_of, read
from armillary.schedules.edges import at_eval
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


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take most of a small twin's time."""
    monkeypatch.setattr("armillary.session.twin_page.can_draw", lambda picture: False)


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


def test_exact_beside_exact_has_a_gap_of_0_exactly():
    found = twin_of("all_reduce", steps=6)
    facts, text = found.facts(), str(found)
    assert facts["exact"] == facts["twin"] and facts["departing"] is None
    assert {row["gap"] for row in facts["gap_at_steps"]} == {0.0}
    assert "gap 0 (spread 0)" in text


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
    assert f"gap +{last.gap:.2g}" in str(found)


def test_a_lossy_exchange_is_shown_beside_its_seconds_and_bytes_and_counted():
    found, facts = (one := twin_of("quantize(bits=8)")), one.facts()
    assert facts["departing"]["counted_bytes"] == facts["departing"]["forecast_bytes"] > 0
    assert 0 < facts["twin"]["step_seconds"] < facts["exact"]["step_seconds"]
    assert facts["exact"]["losses"] != facts["twin"]["losses"] and len(facts["twin"]["losses"]) == 2
    assert "lossy: NOT exact" in str(found) and "counted" in str(found)
    assert all(len(line) <= PAGE for line in str(found).splitlines())


def test_what_the_data_decide_is_counted_beside_its_forecast_and_priced_as_counted():
    found = twin_of("threshold(sparsity=0.9, small=0)", seeds=1)
    facts = found.facts()
    sent, side = facts["departing"], facts["twin"]
    assert sent["counted_bytes"] != sent["forecast_bytes"] and sent["counted_bytes"] > 0
    assert side["sent_bytes"] == pytest.approx(sent["counted_bytes"])
    on_the_link = sent["counted_bytes"] / SLOW.bytes_per_second
    assert on_the_link < side["step_seconds"] < 1.2 * on_the_link + 0.05
    assert "Its step is priced with what was counted" in " ".join(str(found).split())


def test_gradients_that_are_averaged_beside_weights_are_counted_too():
    """In islands, whose nodes of two average in every step and meet in every second."""
    islands = replace(FOUR, nodes=2, workers_per_node=2)
    sent = twin_of("local_steps(steps=2, inside='node')", 8, 1, islands).facts()["departing"]
    assert sent["counted_bytes"] == pytest.approx(sent["forecast_bytes"]) and sent["counted_bytes"] > 0


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
    loader = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)  # draws from torch's stream
    armillary.twin(model, optimizer, loader, square, topology=FOUR, constraints={"*": "one_bit"}, steps=2, seeds=1)
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
    "too few batches": ({"steps": 13}, "batches gave 56; 13 steps of 4 batches, and 8 held out, take 60"),
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
    assert "held-out loss at equal steps" in said
    assert all(len(line) <= PAGE for line in out.splitlines()) and "written: twin.json, twin.png" in out
    kept = json.loads((tmp_path / "twin.json").read_text())
    assert len(kept["twin"]["losses"]) == 2 and (tmp_path / "twin.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
def test_the_command_does_not_go_on_with_seeds_of_an_exchange_that_it_would_not_choose_now(told, tmp_path):
    asked = ("line.py", "--allow", "lossy", "--steps", 2, "--gbit", 0.001)
    assert told(*asked, "--seeds", 1)[0] == 0
    kept = json.loads((tmp_path / "twin.json").read_text())
    chosen = kept["twin"]["name"]
    kept["twin"]["name"] = "one_bit"  # as on another day, with another profile
    (tmp_path / "twin.json").write_text(json.dumps(kept))
    code, _, err = told(*asked, "--seeds", 2, "--resume")
    assert code == 2 and f"seeds trained by one_bit, for which {chosen} was chosen now; drop --resume" in err


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
    monkeypatch.setattr("armillary.session.run_folder.find_spec", lambda name: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        files = twin_of("one_bit", steps=2, seeds=1).save(tmp_path)
    assert [path.name for path in files] == ["twin.json"] and "not drawn" in str(seen[0].message)


TWO = FOUR.of(2)
CHAIN = "gpipe(stages=2, micro_batches=3, points=['2'])"
REPLICAS = "one_f_one_b(stages=2, micro_batches=2, points=['2'])"


def layers(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1)).to(dtype)


def staged_batches(dtype=torch.float32, steps=6, total=3, epoch=6):
    """epoch: after so many steps the same samples come again."""
    draw = torch.Generator().manual_seed(4)
    inputs = [torch.randn(8, 16, generator=draw).to(dtype) for _ in range(epoch * total + 8)]
    inputs = [inputs[number % (epoch * total)] for number in range(steps * total)] + inputs[-8:]
    return [(one, one[:, :1].sin()) for one in inputs]


def read_choice(text):
    return Choice.parse(text) if isinstance(text, str) else text


def staged_twin(schedule, edge=None, back=None, topology=TWO, batches=None, dtype=torch.float32, **more):
    model = layers(dtype)
    edges = {"edge": read_choice(edge), "edge_back": read_choice(back)}
    asked = {"topology": topology, "steps": 6, "seeds": 1, "schedule": Choice.parse(schedule), **edges, **more}
    given = staged_batches(dtype) if batches is None else batches
    return armillary.twin(model, torch.optim.SGD(model.parameters(), lr=0.1), given, square, **asked)


def the_truth(schedule, coded, batches, exchange=None):
    """The last held-out loss by the schedule's reference, whose stages are cut here."""
    model, workers = layers(), 2 if exchange is None else 4
    stages, optimizer = [model[:2], model[2:]], torch.optim.SGD(model.parameters(), lr=0.1)
    table = read(Choice.parse(schedule), workers).schedule()

    def difference(value, wanted):
        return (value - wanted).square().mean()

    if exchange is None:
        truth = Reference(stages, optimizer, table, difference)
    else:
        truth = WorkersReference(stages, optimizer, table, difference)
        named = [dict(stage.named_parameters()) for stage in stages]
        truth.crossings = [Crossing(tuple(one), [*one.values()], codec_exchange(exchange), 2) for one in named]
    truth.edges = Edges(codes_of([coded]), 0, 2)
    for step in range(6):
        if exchange is None:
            truth.step(batches[3 * step : 3 * step + 3])
        else:
            truth.step([batches[4 * step : 4 * step + 2], batches[4 * step + 2 : 4 * step + 4]])
    return judged(model, batches, at_eval(coded, 6))


def codec_exchange(text):
    choice = Choice.parse(text)
    return build_dense(choice.name, **choice.options)


def judged(model, batches, codec):
    """The mean held-out loss, of what decoding gives in the middle."""
    losses = []
    with torch.no_grad():
        for inputs, wanted in batches[-8:]:
            value = model[:2](inputs)
            value = value if codec is None else codec.meaning(value.reshape(-1), None).view(value.shape)
            losses.append(float((model[2:](value) - wanted).square().mean()))
    return sum(losses) / 8


@pytest.mark.parametrize(("schedule", "topology", "total"), [(CHAIN, TWO, 3), (REPLICAS, FOUR, 4)])
def test_under_a_schedule_exact_beside_exact_has_a_gap_of_0_exactly(schedule, topology, total):
    more = {"constraints": {"*": "all_reduce"}} if topology is FOUR else {"edge": "quantize(bits=8, warm_up=99)"}
    found = staged_twin(schedule, topology=topology, batches=staged_batches(total=total), **more)
    assert found.sides.exact.losses == found.sides.other.losses and len(set(found.sides.exact.losses[0])) == 7
    assert {gap.gap for gap in found.sides.at_steps} == {0.0}


def test_an_edge_coded_to_its_own_dtype_has_a_gap_of_0_exactly():
    found = staged_twin(CHAIN, "lower_precision(dtype='bfloat16')", "same", dtype=torch.bfloat16)
    assert found.sides.exact.losses == found.sides.other.losses
    assert found.sides.other.name == "edge lower_precision(dtype=bfloat16), edge back same"


@pytest.mark.parametrize(
    ("edge", "back"),
    [
        ("quantize(bits=4)", "quantize(bits=8)"), ("threshold(sparsity=0.5)", "same"),
        ("hadamard(quantize(bits=4))", None), ("aq_sgd(quantize(bits=2))", "quantize(bits=8)"),
        ("quantize(bits=2, at_eval=off)", None), ("random_k(keep=0.5, at_eval=off)", "random_k(keep=0.5, chunk=4)"),
    ],
)  # fmt: skip
def test_a_coded_edge_is_trained_as_its_codec_means_bit_for_bit(edge, back):
    batches = staged_batches(epoch=2 if "aq_sgd" in edge else 6)
    found = staged_twin(CHAIN, edge, back, batches=batches)
    coded = Edge(read_choice(edge), read_choice(back))
    assert found.sides.other.losses[0][-1] == the_truth(CHAIN, coded, batches)
    assert found.sides.other.losses != found.sides.exact.losses and found.sides.faster > 1
    assert f"edge {edge}" in found.sides.other.name and "lossy: NOT exact" in " ".join(str(found).split())


def test_the_exact_training_is_the_same_beside_any_code():
    one, other = (staged_twin(CHAIN, edge).sides.exact.losses for edge in ("one_bit", "quantize(bits=2)"))
    assert one == other


def test_codes_between_replicas_and_between_stages_are_trained_together_bit_for_bit():
    """DCT as published is both at once."""
    among, batches = "threshold(sparsity=0.5, small=0)", staged_batches(total=4)
    wished = {"*": Choice.parse(among)}
    found = staged_twin(REPLICAS, "threshold(sparsity=0.5)", "same", FOUR, batches, constraints=wished)
    coded = Edge(Choice.parse("threshold(sparsity=0.5)"), Choice("same"))
    assert found.sides.other.losses[0][-1] == the_truth(REPLICAS, coded, batches, among)
    assert among in found.sides.other.name and "what is sent is forecast, not counted" in " ".join(str(found).split())


def test_a_bad_code_of_an_edge_shows_a_gap():
    """Planted: what arrives at the next stage has the wrong sign while it trains."""
    good = build_codec("lower_precision")

    def turned_round():
        return good._replace(meaning=lambda values, draw: good.meaning(-values, draw))

    with registered(codec(), turned_round):
        bad, fair = (staged_twin(CHAIN, f"{name}(at_eval=off)") for name in ("turned_round", "lower_precision"))
    assert bad.sides.at_steps[-1].gap > 10 * abs(fair.sides.at_steps[-1].gap) > 0


def test_gradients_that_come_back_are_coded_too():
    """Planted: they arrive as zeros, so the stage below stays as it was."""
    good, seen = build_codec("lower_precision"), []

    def lost():
        return good._replace(meaning=lambda values, draw: seen.append(values) or torch.zeros_like(values))

    with registered(codec(), lost):
        found = staged_twin(CHAIN, back="lost")
    assert len(seen) == 18 and found.sides.other.losses[0][0] == found.sides.exact.losses[0][0]
    assert found.sides.other.losses[0][-1] > found.sides.exact.losses[0][-1]


def test_an_edge_that_remembers_samples_says_when_none_comes_again():
    with pytest.warns(UserWarning, match="none of 144 samples came a second time"):
        found = staged_twin(CHAIN, "aq_sgd(quantize(bits=2))")
    assert found.sides.exact.losses == found.sides.other.losses  # each crossed whole


NO_EDGES = {
    "no stages": ("simultaneous", {"edge": Choice("one_bit")}, "Name a pipeline as the schedule"),
    "weights go round": ("ring", {"edge": Choice("one_bit")}, "under ring weights and gradients go"),
    "a schedule alone": (CHAIN, {}, "nothing is asked to differ"),
    "the last stage": (CHAIN, {"edge": {1: Choice("one_bit")}}, "stage 1 hands nothing on"),
    "as nothing": (CHAIN, {"edge_back": Choice("same")}, "name the edge's codec too"),
    "sums go round": ("ring", {"constraints": {"*": "one_bit"}}, "carries gradients from rank to rank itself"),
    "too few": (CHAIN, {"edge": Choice("one_bit"), "steps": 7}, "7 steps of 3 batches, and 8 held out, take 29"),
}


@pytest.mark.parametrize("case", NO_EDGES)
def test_edges_that_cannot_be_compared_are_refused_before_the_first_step(case):
    schedule, asked, why = NO_EDGES[case]
    steps = []
    with pytest.raises(ValueError, match=re.escape(why)):
        staged_twin(schedule, told=steps.append, **asked)
    assert steps == []


@pytest.mark.parametrize("schedule", ["gpipe(stages=2, micro_batches=2)", "one_device(micro_batches=2, stages=1)"])
def test_tables_by_row_under_a_schedule_are_refused_with_a_remedy_that_works(schedule):
    words, steps = [word_batch(number, 0)[:2] for number in range(16)], []

    def asked(table):
        model = nn.Sequential(nn.EmbeddingBag(29, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        named = {"constraints": table, "edge": Choice("one_bit")} if "gpipe" in schedule else {"constraints": table}
        return armillary.twin(
            model, torch.optim.SGD(model.parameters(), lr=0.1), words,
            lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
            topology=TWO, schedule=Choice.parse(schedule), steps=2, seeds=1, told=steps.append, **named,
        )  # fmt: skip

    rows = {"0.weight": Choice.parse("owned_rows(rows_as=quantize(bits=8))")}
    with pytest.raises(ValueError, match=r"keeps tables whole, so 0\.weight cannot go by row: plan again"):
        asked(rows)
    assert steps == []
    whole = {"0.weight": "replicated"} if "gpipe" in schedule else {"*": Choice.parse("quantize(bits=8)")}
    assert asked(whole).sides.exact.losses


@pytest.mark.usefixtures("undrawn")
def test_the_command_codes_edges_and_knows_the_training_again(told, tmp_path):
    asked = ("line.py", "--workers", 2, "--schedule", "gpipe(micro_batches=2)",
             "--edge", "hadamard(quantize(bits=4))=0", "--edge-back", "quantize(bits=8)",
             "--steps", 4, "--gbit", 0.001)  # fmt: skip
    code, out, err = told(*asked, "--seeds", 1)
    assert code == 0, err
    said = " ".join(out.split())
    words = "gpipe(micro_batches=2), edge hadamard(quantize(bits=4))=0, edge back quantize(bits=8); 2 workers, 4 steps"
    assert words in said and "both are trained under gpipe" in said
    assert told(*asked, "--seeds", 2, "--resume")[0] == 0
    code, _, err = told(*asked[:-6], "--steps", 4, "--resume")
    assert code == 2 and "drop --resume" in err
    code, _, err = told("line.py", "--edge", "one_bit")
    assert code == 2 and "Name a pipeline as the schedule" in err
