"""`armillary advise`: one page over all methods, from the command line and from a script."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary.cli.main import app
from armillary.plans import seconds_text
from forked import command

# The published systems that the library holds, by the name of their row.
TWELVE = (
    "Parallax", "Cyclic Data Parallelism", "DCT", "activation compression", "EventGraD", "KARMA", "local losses", "PNN",
    "Colossal-AI", "parallel equations", "RePurpose", "in situ",
)  # fmt: skip
OWN = Path(__file__).parents[2] / ".ci" / "own_models.py"
MOST_LINES, WIDTH = 60, 100
MOST_UNKNOWN = 5
WORKLOADS = ("language_model", "recommender", "translation", "vision")
LINK = armillary.Link(1e-4, 1.25e7)
MACHINES = armillary.Topology(2, 1, LINK, LINK, 1 << 40)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Runs a command in an empty folder; gives what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(app, [str(one) for one in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def rows_of(found):
    return {row["method"]: row for row in found["rows"]}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("gbit", [0.1, 10])
def test_every_system_has_its_row_with_memory_that_fits_and_with_half_of_it(typed, workload, gbit):
    asked = ("advise", workload, "--small", "--workers", 2, "--gbit", gbit)
    found = json.loads(typed(*asked, "--json"))
    rows = rows_of(found)
    assert set(TWELVE) <= rows.keys()
    for row in rows.values():
        assert row["applies"] or row["reason"], row
        assert row["forecast"] or row["latency_seconds"] or row["try"] or not row["applies"], row
        assert row["shell"] or row["python"] or not row["applies"], row
        assert len(row["python"].splitlines()) <= 10 and "its advice failed" not in row["reason"], row
    unknown = [
        name
        for name in TWELVE
        if rows[name]["applies"] and not rows[name]["forecast"] and rows[name]["latency_seconds"] is None
    ]
    assert len(unknown) <= MOST_UNKNOWN
    page = typed(*asked, "--memory", f"{int(found['plan']['memory_bytes'] / 2)}B")
    lines = page.rstrip().splitlines()
    assert lines[0].startswith("Bottleneck: memory. ") and "its advice failed" not in page
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH, page
    assert [name for name in TWELVE if not re.search(rf"^ *{name}\b", page, re.MULTILINE)] == []


def test_figures_are_those_that_plan_prints_of_the_same_files(typed):
    MACHINES.save("two.json")
    task = armillary.workloads.vision.workload(**armillary.workloads.vision.SMALL)
    model = task.model()
    batches = [batch for worker in range(2) for batch in [next(task.batches("train", worker, 2, 0))]]
    armillary.profile(model, batches, task.loss, workers=2).save("model.json")
    files = ("--topology", "two.json", "--profile", "model.json")
    rows = rows_of(json.loads(typed("advise", "vision", "--small", *files, "--json")))
    compared = 0
    for row in rows.values():
        line = shlex.split(row["shell"])
        if line[1:2] != ["train"] or "local_losses" in row["shell"]:  # which plans for a model with heads
            continue
        options = [word for word in line[2:] if word not in ("--workers", "2")]
        plan = json.loads(typed("plan", *options, *files, "--json"))["plan"]
        forecast = row["forecast"]
        assert seconds_text(forecast["seconds"]) == seconds_text(plan["step_seconds"]), row
        assert forecast["peak_bytes"] == plan["activation_bytes"], row
        compared += 1
    assert compared >= 8


class Plain(nn.Module):
    """Two layers, which no method finds anything special in."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Looped(nn.Module):
    """A cell in a loop of its own."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 1)

    def forward(self, xs):
        state = xs.new_zeros(xs.shape[0], 8)
        for x in xs.expand(20, *xs.shape):
            state = self.cell(x, state)
        return self.out(state)


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 1)

    def forward(self, x):
        return self.only(x).sin()


def squared(model, batch):
    return model(batch[0]).square().mean()


def advised(model, loss=squared, topology=MACHINES, **asked):
    batches = [(torch.randn(4, 4), torch.randint(0, 3, (4,))) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return armillary.advise(model, optimizer, batches, loss, topology=topology, **asked)


def reasons(page):
    return {row.method: row.advice.reason for row in page.rows if not row.advice.applies}


def test_what_does_not_apply_says_why():
    plain, alone = reasons(advised(Plain())), reasons(advised(Plain(), topology=MACHINES.of_one_node(1)))
    assert plain["Parallax"] == "no table is read by row"
    assert plain["parallel equations"] == "not a recurrence, and no causal attention"
    assert plain["PNN"].startswith("the loss is no cross entropy")
    assert plain["Colossal-AI"].startswith("no chain of blocks whose linear layers")
    assert plain["in situ"].startswith("batches come from data that are there")
    for method in ("DCT", "EventGraD", "Cyclic Data Parallelism", "local losses", "Colossal-AI", "RePurpose"):
        assert alone[method].startswith("one worker"), (method, alone[method])
    one = reasons(advised(OneLayer()))
    assert one["Cyclic Data Parallelism"] == one["local losses"] == "one stage: nothing to pipeline"
    assert one["activation compression"] == "one stage: nothing to pipeline"
    assert one["RePurpose"] and one["KARMA"].startswith("to compute a stage again spares no memory")


def test_a_recurrence_in_a_loop_of_the_models_own_is_found():
    (row,) = [row for row in advised(Looped()).rows if row.method == "parallel equations"]
    assert row.advice.applies and "cell: 20 steps" in row.advice.reason and "'cell'" in row.advice.python


def test_a_recurrence_module_is_timed_if_asked():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.out(self.rnn(x.expand(32, *x.shape))[0])

    page = advised(Module(), target="latency", measure=True)
    (row,) = [row for row in page.rows if row.method == "parallel equations"]
    assert row.advice.latency_seconds is not None and "32 steps: " in row.advice.reason
    assert page.rows[0].advice.latency_seconds is not None  # sorted by it
    assert "a trained model's forward" in str(page) and "EventGraD" not in str(page)


def test_blocks_are_cut_over_a_mesh_at_the_price_of_the_rooms_own_plan():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 1))
    batches = [(torch.randn(4, 6, 4),) for _ in range(4)]
    page = armillary.advise(
        model, torch.optim.Adam(model.parameters()), batches, squared, topology=MACHINES, measure=True
    )
    advice = {row.method: row.advice for row in page.rows}["Colossal-AI"]
    assert f"| {1e3 * advice.forecast.seconds:.1f} |" in str(advice.source) and "'1.layers'" in advice.python
    assert f"{advice.forecast.memory_bytes / 1e6:.1f}" in str(advice.source)


def test_activations_are_given_back_at_the_price_of_the_rooms_own_plan():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(4)])
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(512, 4),)] * 2
    page = armillary.advise(model, optimizer, batches, squared, topology=MACHINES)
    advice = {row.method: row.advice for row in page.rows}["KARMA"]
    assert f"{advice.source.forecast.seconds * 1e3:,.1f} ms" in str(advice.source)
    assert seconds_text(advice.source.forecast.seconds) in advice.reason
    assert advice.forecast.peak_bytes < page.plan.peak_bytes and advice.forecast.seconds >= page.plan.seconds


def test_targets_sort_a_script_prints_and_a_picture_is_drawn(typed, tmp_path):
    asked = ("advise", "recommender", "--small", "--workers", 2, "--gbit", 0.1)
    for target, figure in (
        ("bytes", lambda row: row["forecast"]["sent_bytes"]),
        ("seconds", lambda row: row["forecast"]["seconds"]),
    ):
        found = json.loads(typed(*asked, "--target", target, "--json"))["rows"]
        figures = [figure(row) for row in found if row["applies"] and row["forecast"] and row["fits"]]
        assert figures == sorted(figures)
    assert "armillary.parallelize(" in typed(*asked, "--script", "EventGraD")
    assert "written: advice.png" in typed(*asked, "--out", "advice.png") and (tmp_path / "advice.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "speed"), "--target: no target 'speed'; there are seconds, memory, bytes, latency"),
        (("--memory", "lots"), "--memory: want a size such as 40MiB or 2GiB, got 'lots'"),
        (("--script", "Karma"), "advise: no method 'Karma'; there are "),
        (("--out", "advice.pdf"), "--out: want the path of a .png, got advice.pdf"),
    ],
)
def test_what_is_typed_wrongly_is_refused_in_a_line(words, said):
    done = CliRunner().invoke(app, ["advise", "recommender", "--small", "--workers", "2", *words])
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output


STRANGER = '''
"""A method of a stranger's own: every gradient is sent by one all-gather."""

from armillary.exchanges import DenseExchange, Leg
from armillary.exchanges import dense_exchange
from armillary.plans import Advice, Situation, advises, planned
from armillary.plans import AllGather


@dense_exchange()
def everyones_sum():
    def push(parcel, state, place):
        everyones = yield AllGather(parcel.values)
        tails = yield AllGather(parcel.tail)
        return parcel.answered(everyones.sum(0), tails.sum(0)), state

    def sent_bytes(layout, topology):
        return [(topology.workers - 1) * (layout.nbytes + 8.0 * layout.tail)] * topology.workers

    def legs(layout, topology):
        return [Leg("neighbour", sent_bytes(layout, topology)[0], topology.workers - 1, "AllGather")]

    return DenseExchange(push, 2, sent_bytes, legs)


@advises("gathered sum", "gradients by all-gather")
def advice(situation: Situation) -> Advice:
    return planned(situation, "N - 1 times the bytes", "--exchange 'everyones_sum=*'", {"*": "everyones_sum"})
'''


def test_a_strangers_method_has_a_row(tmp_path):
    """In a process of its own: what is registered there must not be planned with here."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    words = ("advise", "recommender", "--small", "--workers", 2, "--import", "stranger.py", "--json")
    (ended,) = command(words, tmp_path)
    assert ended.code == 0, ended
    row = rows_of(json.loads(ended.out))["gathered sum"]
    assert row["applies"] and row["forecast"]["seconds"] > 0 and row["departures"] == []
    assert "--import stranger.py" in row["shell"] and "everyones_sum=*" in row["shell"]


def test_where_nothing_fits_the_two_best_remedies_are_named_with_their_figures(typed, tmp_path):
    shutil.copy(OWN, tmp_path)
    asked = ("advise", OWN.name, "--workers", 2, "--gbit", 0.1)
    need = json.loads(typed(*asked, "--json"))["plan"]["memory_bytes"]
    replace(MACHINES, memory_bytes=int(0.8 * need)).save("tight.json")
    refused = CliRunner().invoke(app, ["plan", OWN.name, "--topology", "tight.json"])
    assert refused.exit_code != 0 and "nothing fits" in refused.stderr
    told = refused.stderr.split("these would do best:")[1].strip().splitlines()
    wanted = r"\): [\d.]+ [KM]iB, [\d.]+ [mu]?s a step: \w+"
    assert len(told) == 2 and "exact)" in told[0] and all(re.search(wanted, one) for one in told), told
    tight = json.loads(typed("advise", OWN.name, "--topology", "tight.json", "--json"))
    assert tight["bottleneck"].startswith("Bottleneck: memory.")
    fitting = {row["method"] for row in tight["rows"] if row["applies"] and row["forecast"] and row["fits"]}
    assert {one.strip().split(" (")[0] for one in told} <= fitting
