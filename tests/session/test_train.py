"""Laws of a training run: what it leaves, how it goes on, what it refuses and what it says."""

import dataclasses
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.checkpoint.folder import latest_checkpoint
from armillary.cli.names import find, small
from armillary.exchanges.look_up import HEADER_BYTES, announcement_bytes
from armillary.planning.prefetch import prefetching
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Plan, Trace
from armillary.plans.group import Band
from armillary.session import plan_job as decide_file
from armillary.session.compare import compare_run
from armillary.session.double_precision import InDouble
from armillary.session.events import Ended, Evaluated, PlannedJob, Progress, Resumed, Saved, Warned
from armillary.session.plan_job import JobRequest, assumptions_of
from armillary.session.run_folder import claim_folder, keep_others_out, open_folder, run_folder
from armillary.session.traffic_meter import STEP
from armillary.session.train import train
from armillary.session.train_settings import Settings
from armillary.transport.agreement import by_rank_zero
from armillary.transport.transport import Transport


def workload_of(name, **options):
    return find(name, {**small(name), **options})


def run(rank, workers, name, folder, options, **settings):
    task = InDouble(workload_of(name, **options))
    return list(train(task, Settings(Path(folder), every_seconds=0.0, **settings)))


def train_job(rank, workers, name, folder, options, settings):
    return run(rank, workers, name, folder, options, **settings)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_run_tells_what_it_does_and_leaves_all_of_it_in_its_folder(crew, tmp_path):
    request = JobRequest(PlanRequest({"output": "owned_rows", "embedding.weight": "gather_rows"}))
    settings = {"steps": 25, "every_steps": 10, "keep": 1, "request": request}
    events, others = crew(2).run(train_job, "language_model", str(tmp_path), {}, settings)
    assert [type(event) for event in events[:2]] == [PlannedJob, Progress]
    assert [event.step for event in of(Progress, events)] == [10, 20, 25]
    assert [event.step for event in of(Saved, events)] == [10, 20, 25]
    assert [(event.step, event.is_whole) for event in of(Evaluated, events)] == [
        (10, False), (20, False), (25, False), (25, True)
    ]  # fmt: skip
    assert (others[-1].metrics, others[-1].comparison) == (events[-1].metrics, events[-1].comparison)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "plan.json", "profile.json", "made_for.json", "topology.json", "trace.json", "summary.json", "metrics.jsonl",
        "plot.png", "checkpoints",
    }  # fmt: skip
    assert Plan.load(tmp_path / "plan.json") == of(PlannedJob, events)[0].plan
    trace = Trace.load(tmp_path / "trace.json")
    assert len(trace.ranks) == 2
    for mine in trace.ranks:
        requests = [record for record in mine if record.group != STEP]
        assert {record.step for record in requests} == set(range(25))
        assert [record.step for record in mine if record.group == STEP] == [n for n in range(25) if n not in (4, 5)]
        for record in requests:  # by the clock that all ranks of a machine share
            assert 0 <= record.start_seconds < 1000
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000025"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["kind"] == "progress"] == [e.loss for e in of(Progress, events)]
    afterwards = {line.group: line for line in compare_run(tmp_path, Band()).lines}
    for line in events[-1].comparison:  # the end of a run and `compare` say the same
        told, found = (line.forecast, line.measured), afterwards[line.group]
        for mine, theirs in zip(told, (found.forecast, found.measured), strict=True):
            assert dataclasses.astuple(mine) == pytest.approx(dataclasses.astuple(theirs)) and mine.seconds > 0
    assert events[-1].forecast.seconds == pytest.approx(afterwards["step"].forecast.seconds)


def test_bytes_that_data_do_not_decide_are_forecast_to_the_byte(crew, tmp_path):
    settings = {
        "steps": 10,
        "request": JobRequest(PlanRequest({"output": "owned_rows", "embedding.weight": "gather_rows"})),
    }
    events = crew(2).run(train_job, "language_model", str(tmp_path), {}, settings)[0]
    for line in events[-1].comparison:
        if line.exchange == "all_reduce":
            assert line.measured.sent_bytes == line.forecast.sent_bytes > 0
        elif line.exchange:  # these follow the batches
            assert line.measured.sent_bytes == pytest.approx(line.forecast.sent_bytes, rel=0.3)
        if line.exchange:
            assert line.measured.memory_bytes == pytest.approx(line.forecast.memory_bytes, rel=0.5)


@pytest.mark.parametrize("before", [1, 2])
def test_a_resumed_run_ends_where_an_unbroken_one_does(crew, tmp_path, before):
    """On the same number of workers bit for bit in double; on another, after as many examples."""
    whole = crew(2).run(train_job, "recommender", str(tmp_path / "whole"), {}, {"steps": 12})[0]
    broken = str(tmp_path / "broken")
    crew(before).run(train_job, "recommender", broken, {"batch_size": 16 // before}, {"steps": 6})
    again = crew(2).run(train_job, "recommender", broken, {}, {"steps": 12, "resume": True})[0]
    assert [event.step for event in of(Resumed, again)] == [6]
    if before == 2:  # a glance looks at the same batches again
        glance, as_before = (
            next(event for event in of(Evaluated, events) if event.step == 12) for events in (again, whole)
        )
        assert glance.metrics == pytest.approx(as_before.metrics, rel=1e-12)
    for name, value in whole[-1].metrics.items():
        assert again[-1].metrics[name] == pytest.approx(value, rel=1e-12 if before == 2 else 1e-9)


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        (PlanRequest(schedule=Choice("delayed_all_reduce")), "schedule delayed_all_reduce"),
        (PlanRequest({"*": Choice("quantize", {"bits": 8})}), "NOT exact"),
    ],
)
def test_a_run_on_other_workers_does_not_leave_its_rule_without_a_word(crew, tmp_path, wanted, rule):
    asked = JobRequest(wanted)
    crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 2, "request": asked})
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(Exception, match=f"resume: the run trained on 2 workers.*{rule}.*--schedule and --exchange"):
        crew(1).run(train_job, "recommender", str(tmp_path), {}, {"steps": 4, "resume": True})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


def test_a_run_that_goes_on_tells_no_step_twice_whatever_a_killed_one_had_told(crew, tmp_path):
    settings = {"every_steps": 6, "request": JobRequest(PlanRequest({"*": "all_reduce"}))}
    crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 12, **settings})
    shutil.rmtree(tmp_path / "checkpoints/step-00000012")  # what was told after step 6 stays told
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "progress", "st')
    crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 20, "resume": True, **settings})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "progress"] == [10, 20]
    told = [(line["kind"], line["step"], line.get("is_whole")) for line in lines]
    assert len(told) == len(set(told)) and not (tmp_path / "metrics.jsonl.draft").exists()


@pytest.mark.filterwarnings("ignore:checkpoint. skipped")
def test_a_run_without_a_whole_checkpoint_says_that_it_begins_anew(crew, tmp_path):
    crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 2})
    (tmp_path / "checkpoints/step-00000002/complete.json").unlink()
    events, _ = crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 2, "resume": True})
    (said,) = of(Warned, events)
    assert said.text == f"{tmp_path} holds no whole checkpoint, so training begins at step 0"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "progress"] == [2]


def train_while_the_process_gives_memory_back(rank, workers, folder):
    found = iter([(10**12, 10**12)])  # when training begins; later calls find less
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armillary.session.train.resident_bytes", lambda: next(found, (10**9, 10**9)))
        *_, ended = run(rank, workers, "language_model", folder, {}, steps=3)
    return ended.resident_bytes, sum(line.measured.memory_bytes for line in ended.comparison)


def test_memory_is_never_measured_below_what_the_tensors_hold(crew, tmp_path):
    for resident, held in crew(2).run(train_while_the_process_gives_memory_back, str(tmp_path)):
        assert resident >= held > 0


READER = {"width": 32, "hidden": 64, "length": 20, "batch_size": 16, "negatives": 64}
RATER = {"rows": 500, "width": 16, "hidden": 32, "batch_size": 64}


@pytest.mark.parametrize(
    ("name", "options", "way"),
    [
        ("language_model", READER, {"output": "gather_rows", "embedding.weight": "owned_rows"}),
        ("recommender", RATER, {"*": "all_reduce"}),
        ("recommender", {**RATER, "rows": 5000}, {"wide.weight": "owned_rows", "deep.weight": "owned_rows"}),
        ("vision", {}, {}),
    ],
)
def test_the_memory_of_a_step_in_its_fullest_moment_is_forecast(crew, tmp_path, name, options, way):
    """Forecast: a plain step in one process, and what the plan keeps and sends. Measured: tensors of both ranks."""
    ended = crew(2).run(plain_job, name, str(tmp_path), options, way)[0]
    assert ended.peak_bytes == pytest.approx(ended.forecast.memory_bytes, rel=0.1)
    assert ended.resident_bytes > 0


def plain_job(rank, workers, name, folder, options, way):
    *_, ended = train(
        workload_of(name, **options), Settings(Path(folder), 8, every_seconds=0.0, request=JobRequest(PlanRequest(way)))
    )
    return ended


def measured_again(rank, workers, folder, torch_version):
    """How often links are measured where a run goes on."""
    calls, before = [], decide_file.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide_file, "measure", lambda transport: calls.append(1) or before(transport))
        patch.setattr(torch, "__version__", torch_version or torch.__version__)
        run(rank, workers, "recommender", folder, {}, steps=6, resume=True)
    return len(calls)


@pytest.mark.parametrize(("torch_version", "times"), [("", 0), ("1.0", 1)])
def test_a_run_that_goes_on_measures_its_links_only_where_they_may_be_others(crew, tmp_path, torch_version, times):
    crew(2).run(train_job, "recommender", str(tmp_path), {}, {"steps": 4})
    assert crew(2).run(measured_again, str(tmp_path), torch_version) == [times] * 2


def test_a_run_that_looks_ahead_is_resumed_at_the_batch_it_had_reached(crew, tmp_path):
    """Its feed is three batches further by then. It ends where a run does that never looked ahead, bit for bit."""
    request = JobRequest(PlanRequest({"wide.weight": "owned_rows", "deep.weight": "owned_rows"}))
    whole = crew(2).run(train_job, "recommender", str(tmp_path / "whole"), {}, {"steps": 14, "request": request})[0]
    facts = whole[0]
    ahead = prefetching(facts.plan, facts.profile, facts.topology)
    groups = [
        group if group.prefetch == "none" else dataclasses.replace(group, prefetch="rows") for group in ahead.groups
    ]
    assert {group.prefetch for group in groups} == {"none", "rows"}  # whatever the links of today make of it
    request = JobRequest(plan=dataclasses.replace(ahead, groups=tuple(groups)))
    broken = str(tmp_path / "broken")
    crew(2).run(train_job, "recommender", broken, {}, {"steps": 7, "request": request})
    again = crew(2).run(train_job, "recommender", broken, {}, {"steps": 14, "resume": True, "request": request})[0]
    assert [event.step for event in of(Resumed, again)] == [7]
    assert again[-1].metrics == whole[-1].metrics
    trace = Trace.load(Path(broken) / "trace.json")
    asked = {record.sent_bytes for mine in trace.ranks for record in mine if record.group == "look-ups"}
    assert asked == {HEADER_BYTES + announcement_bytes(2)}  # as headers are where two tables prefetch


def test_four_workers_have_the_loss_curve_of_one_on_the_same_global_batches(crew, tmp_path):
    options = {"steps": 40}
    four = crew(4).run(train_job, "recommender", str(tmp_path / "4"), {"batch_size": 4}, options)[0]
    one = crew(1).run(train_job, "recommender", str(tmp_path / "1"), {"batch_size": 16}, options)[0]
    curve = [event.loss for event in of(Progress, one)]
    assert len(set(curve)) == 4
    assert [event.loss for event in of(Progress, four)] == pytest.approx(curve, rel=1e-9)
    assert four[-1].metrics == pytest.approx(one[-1].metrics, rel=1e-9)


@dataclasses.dataclass(frozen=True)
class Altered:
    """A workload with something wrong with it."""

    inner: object
    nan_at: int = -1
    is_shared: bool = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batches(self, split, worker, workers, seed):
        return self.inner.batches(split, 0 if self.is_shared else worker, workers, seed)

    def loss(self, model, batch):
        loss = self.inner.loss(model, batch)
        steps = next(model.parameters()).new_zeros(()) + getattr(model, "seen", 0)
        model.seen = int(steps) + (1 if model.training else 0)
        return loss * math.nan if steps == self.nan_at else loss


def nan_job(rank, workers, folder):
    task = Altered(workload_of("recommender"), nan_at=9)
    events = train(task, Settings(Path(folder), steps=20, every_steps=5))
    with pytest.raises(FloatingPointError) as caught:
        for _ in events:
            pass
    return str(caught.value), str(latest_checkpoint(Path(folder) / "checkpoints"))


def test_a_loss_that_is_not_finite_names_rank_step_and_the_last_good_checkpoint(crew, tmp_path):
    for rank, (message, good) in enumerate(crew(2).run(nan_job, str(tmp_path))):
        assert message.startswith(f"rank {rank}: the loss is nan at step ")
        assert good in message and good.endswith("step-00000005")


def alike_job(rank, workers, folder):
    return list(train(Altered(workload_of("recommender"), is_shared=True), Settings(Path(folder), steps=1)))


def test_ranks_that_draw_the_same_data_are_warned_of(crew, tmp_path):
    events = crew(2).run(alike_job, str(tmp_path))[0]
    assert [event.text.split(" draw")[0] for event in of(Warned, events)] == ["ranks 0, 1"]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to .*file/run .*pass a --runs"):
        open_folder(tmp_path / "file" / "run")


def second_job(rank, workers, folder):
    events = train(workload_of("recommender"), Settings(Path(folder), steps=1))
    with pytest.raises(ValueError, match=r"another run is at work in .*; wait until it has ended") as caught:
        list(events)
    return str(caught.value)


def test_two_runs_at_once_in_one_folder_are_refused_and_leave_it_alone(crew, tmp_path):
    with ExitStack() as held:
        keep_others_out(tmp_path, held)
        told = crew(2).run(second_job, str(tmp_path))
        assert told[1] == f"rank 0 failed: {told[0]}"
        assert not list(tmp_path.iterdir())
    assert isinstance(crew(2).run(alike_job, str(tmp_path))[0][-1], Ended)


def test_a_new_run_never_writes_into_an_old_one(tmp_path):
    assert run_folder(tmp_path, "lm", "", False) == tmp_path / "lm"
    for name in ("lm", "lm-2", "lm-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    assert run_folder(tmp_path, "lm", "", False) == tmp_path / "lm-3"
    with pytest.raises(ValueError, match="already holds a run; pass --resume"):
        run_folder(tmp_path, "lm", "lm-other", False)
    assert run_folder(tmp_path, "lm", "lm-other", True) == tmp_path / "lm-other"
    assert run_folder(tmp_path, "lm", "", True) == tmp_path / "lm-2"
    with pytest.raises(ValueError, match="nothing to resume: no folder other"):
        run_folder(tmp_path, "other", "", True)


def test_runs_that_start_at_once_have_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_folder(tmp_path / "runs", "lm"), range(40)))
    assert {folder.name for folder in claimed} == {"lm", *(f"lm-{number}" for number in range(2, 41))}


def test_a_run_is_gone_on_with_whatever_marks_its_name_has(tmp_path):
    for name in ("runs/big/lm", "runs/lm[1]", "runs/lm[1]-2", "runs/lm*", "elsewhere/lm"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("big/lm", "lm[1]", "lm*", str(tmp_path / "elsewhere/lm")):
        assert run_folder(tmp_path / "runs", "other", name, True) == tmp_path / "runs" / name
    assert run_folder(tmp_path / "runs", "lm[1]", "", True) == tmp_path / "runs" / "lm[1]-2"
    with pytest.raises(ValueError, match="nothing to resume: no folder big/other"):
        run_folder(tmp_path / "runs", "lm", "big/other", True)


def fail_on_zero(rank, workers):
    transport = Transport()
    with pytest.raises(ValueError, match="no") as caught:
        by_rank_zero(transport, refuse)
    fine = by_rank_zero(transport, lambda: rank)
    transport.close()
    return str(caught.value), fine


def refuse():
    raise ValueError("no")


def test_what_rank_zero_cannot_do_fails_on_every_rank(crew):
    assert crew(2).run(fail_on_zero) == [("no", 0), ("rank 0 failed: no", 0)]


@pytest.mark.parametrize(
    ("make", "slots", "moves", "temporaries"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, False, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, True, 0),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), 1, False, 1),
        (lambda p: torch.optim.Adam(p, lr=0.1), 2, True, 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3, True, 2),
    ],
)
def test_what_an_optimizer_keeps_and_moves_is_found_by_trying_it(make, slots, moves, temporaries):
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = make([parameter])
    found = assumptions_of(optimizer)
    assert (found.optimizer_slots, found.moves_quiet_rows, found.step_slots) == (slots, moves, temporaries)
    assert torch.equal(parameter, torch.ones(3, 2))
