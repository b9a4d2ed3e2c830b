"""`armillary advise`: one page over all methods, from the command line and from a script."""

import json
import re
import runpy
import shlex
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary import repurpose
from armillary.cli.main import app
from armillary.plans import seconds_text
from armillary.solvers.advice import _cell_of
from forked import command

# The published systems that the library holds, by the name of their row.
TWELVE = (
    "Parallax", "Cyclic Data Parallelism", "DCT", "activation compression", "EventGraD", "KARMA", "local losses", "PNN",
    "Colossal-AI", "parallel equations", "RePurpose", "in situ",
)  # fmt: skip
OWN = Path(__file__).parents[2] / ".ci" / "own_models.py"
MOST_LINES, WIDTH = 60, 100
MOST_UNKNOWN = 5
MOST_TOGETHER = 5
GBIT = {"language_model": 0.1, "recommender": 10, "translation": 10, "vision": 0.1}
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


def workload_of(name):
    """A small one: built in, or the tests' own, whose tables go by row."""
    if name == OWN.name:
        return runpy.run_path(str(OWN))["workload"](kind="tables")
    module = import_module(f"armillary.workloads.{name}")
    return module.workload(**module.SMALL)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The profile of a small workload in a file, made once."""
    folder = tmp_path_factory.mktemp("profiles")

    def path_of(workload, workers=2):
        path = folder / f"{workload} {workers}.json"
        if not path.exists():
            task = workload_of(workload)
            batches = [next(task.batches("train", worker, workers, 0)) for worker in range(workers)]
            armillary.profile(task.model(), batches, task.loss, workers=workers).save(path)
        return path

    return path_of


@pytest.mark.parametrize(("workload", "gbit"), GBIT.items())
def test_every_system_has_its_row_with_memory_that_fits_and_with_half_of_it(typed, profiled, workload, gbit):
    asked = ("advise", workload, "--small", "--workers", 2, "--gbit", gbit, "--profile", profiled(workload))
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
    together = found["combinations"]
    assert len(together) <= MOST_TOGETHER and all(one["shell"] or one["python"] for one in together), together
    page = typed(*asked, "--memory", f"{int(found['plan']['memory_bytes'] / 2)}B")
    lines = page.rstrip().splitlines()
    assert lines[0].startswith("Bottleneck: memory. ") and "its advice failed" not in page
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH, page
    assert [name for name in TWELVE if not re.search(rf"^ *{name}\b", page, re.MULTILINE)] == []


OF_ROOMS = {"KARMA", "Colossal-AI", "RePurpose"}  # their own plans are printed below


def test_figures_are_those_that_plan_prints_of_the_same_files(typed, profiled):
    compared, known = set(), set()
    shutil.copy(OWN, ".")
    for workload, option, workers in (("vision", "--small", 2), (OWN.name, "--set=kind=tables", 4)):
        MACHINES.of(workers).save("machines.json")
        files = ("--topology", "machines.json", "--profile", profiled(workload, workers))
        found = json.loads(typed("advise", workload, option, *files, "--json"))
        known |= {row["method"] for row in found["rows"] if row["forecast"]}
        asked = {row["method"]: row for row in found["rows"] if row["forecast"] and row["method"] not in OF_ROOMS}
        asked |= {one["name"]: one for one in found["combinations"] if "--exchange" in one["shell"]}
        for name, one in asked.items():
            plan = planned(typed, one["shell"], files)
            forecast = one["forecast"]
            assert seconds_text(forecast["seconds"]) == seconds_text(plan["step_seconds"]), name
            assert forecast["peak_bytes"] == plan["activation_bytes"], name
            compared.add(name)
    assert known - compared - OF_ROOMS == set()
    assert {"tables by row + int8 for the rest", "tables by row + bfloat16"} <= compared


def planned(typed, shell, files):
    """By the line of the row with `plan` in place of `train`. Where the schedule changes the model, whose profile is
    another, by `armillary.plan` of the same files."""
    program, train, *options = shlex.split(shell)
    assert (program, train) == ("armillary", "train")
    if "local_losses" not in shell:
        at = options.index("--workers")
        options = options[:at] + options[at + 2 :]
        return json.loads(typed("plan", *options, *files, "--json"))["plan"]
    _, topology, _, profile = files
    schedule = options[options.index("--schedule") + 1]
    task = workload_of(options[0])
    assumed = armillary.assumptions_of(task.optimizer(task.model().parameters()))
    read = armillary.Profile.load(profile), armillary.Topology.load(topology)
    return json.loads(armillary.plan(*read, schedule=schedule, assumptions=assumed).to_json())


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


def squared(model, batch):
    return model(batch[0]).square().mean()


def advised(model, loss=squared, topology=MACHINES, **asked):
    batches = [(torch.randn(4, 4), torch.randint(0, 3, (4,))) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return armillary.advise(model, optimizer, batches, loss, topology=topology, **asked)


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


def test_a_recurrence_module_that_is_quicker_than_the_solver_saves_nothing(monkeypatch):
    """A loop over cells in Python takes longer than torch's own module, which is what the forward runs."""
    seconds = iter([3.0, 2.0, 1e-9])  # of the loop, the solver, the module
    monkeypatch.setattr("armillary.solvers.advice.seconds_of", lambda call: next(seconds))

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 4)

        def forward(self, x):
            return self.rnn(x.expand(32, *x.shape))[0]

    page = advised(Module(), target="latency", measure=True)
    (row,) = [row for row in page.rows if row.method == "parallel equations"]
    assert row.advice.latency_seconds == page.forward_seconds


@pytest.mark.parametrize("module", [nn.RNN(3, 4, nonlinearity="relu"), nn.RNN(3, 4), nn.GRU(3, 4), nn.LSTM(3, 4)])
def test_a_recurrence_is_tried_by_its_own_cell(module):
    cell, width, size = _cell_of(module)
    xs, state = torch.randn(5, width), torch.zeros(size)
    for x, expected in zip(xs, module(xs)[0], strict=True):
        state = cell(x, state)
        assert torch.allclose(state[:4], expected, atol=1e-6)


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


def test_replicas_of_a_cut_model_are_averaged_in_the_script():
    fast = armillary.Link(1e-7, 1e12)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batches = [torch.randn(4, 16, 4) for _ in range(4)]
    page = armillary.advise(
        model,
        torch.optim.AdamW(model.parameters()),
        batches,
        lambda model, x: model(x).square().mean(),
        topology=armillary.Topology(4, 1, fast, fast, 1 << 40),
        measure=True,
    )
    (row,) = [row for row in page.rows if row.method == "Colossal-AI"]
    wanted = "fully_shard(" if "FSDP2" in row.advice.reason else "DDP("
    assert "'data': 2" not in row.advice.python or wanted in row.advice.python
    assert "'data': 2" in row.advice.python


def test_activations_are_given_back_at_the_price_of_the_rooms_own_plan():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)) for _ in range(4)])
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), [(torch.randn(512, 4),)] * 2
    page = armillary.advise(model, optimizer, batches, squared, topology=MACHINES)
    advice = {row.method: row.advice for row in page.rows}["KARMA"]
    assert f"{advice.source.forecast.seconds * 1e3:,.1f} ms" in str(advice.source)
    assert seconds_text(advice.source.forecast.seconds) in advice.reason
    assert advice.forecast.peak_bytes < page.plan.peak_bytes and advice.forecast.seconds >= page.plan.seconds


def test_neurons_are_cut_at_the_bytes_that_the_rooms_own_search_begins_with():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(8, 4),) for _ in range(4)]
    page = armillary.advise(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, squared, topology=MACHINES)
    advice = {row.method: row.advice for row in page.rows}["RePurpose"]
    shards = repurpose.cut(model, 2, batches, lambda one, judged: 0.0, drop=0.01)
    plain = sum(one.plain for one in shards.cut.traffic())
    assert advice.forecast.sent_bytes == plain * 4 * 8 / 2  # float32, samples of a batch, ranks


def test_what_works_together_has_a_line_to_type_and_a_script(typed, profiled):
    shutil.copy(OWN, ".")
    profile = profiled(OWN.name, 4)
    page = typed("advise", OWN.name, "--set", "kind=tables", "--workers", 4, "--gbit", 0.1, "--profile", profile)
    (listed,) = (one for one in page.splitlines() if one.startswith("tables by row + int8 for the rest "))
    assert "int8=*" in listed
    asked = ("advise", "language_model", "--small", "--workers", 2, "--gbit", 0.1, "--profile")
    script = typed(*asked, profiled("language_model"), "--script", "the plan by price + KARMA")
    assert "residency.hold(" in script and "parallelize(" in script and len(script.splitlines()) <= 10


def test_targets_sort_a_script_prints_and_a_picture_is_drawn(typed, profiled, tmp_path):
    asked = ("advise", "recommender", "--small", "--workers", 2, "--gbit", 0.1, "--profile", profiled("recommender"))
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


def test_a_strangers_method_has_a_row(tmp_path, profiled):
    """In a process of its own: what is registered there must not be planned with here."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    words = ("advise", "recommender", "--small", "--workers", 2, "--import", "stranger.py", "--json")
    (ended,) = command((*words, "--profile", profiled("recommender")), tmp_path)
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
