"""A run's forecast beside what was measured, group by group, and whether the two agree within a band.

Bytes and memory of a group are the run's means over workers. Seconds of a group are those in which its requests were in
flight, which depends on what hides them. So the plan is played against a clock (`planning/simulator.py`), and measured
seconds count from when the last rank had asked (`Trace.joint_seconds`).

Steps of a run are not alike. So a group's seconds are the *middle half* of its steps, first to third quartile. They are
inside where the forecast lies within the band of that stretch. The whole step is held to its median, or to the median
of means over a period.

Edges of a schedule have lines of their own, messages both ways. They are a part of the group that is charged with what
the stage sends. Memory of such a group has no band: the plan counts its gradient, which is gone between two steps.

Memory of the step is the peak of its tensors, forecast from a plain step in one process. What the process needs beside
tensors has no forecast and no band. A script's run (`kept_report`) measures neither, since every operation of a step
would have to be looked at.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from warnings import warn

from armillary.planning.pricing import Case, assumptions_behind
from armillary.plans.group import Band, Forecast
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology, read_kept
from armillary.plans.trace import Trace
from armillary.schedules.registry import has_clock
from armillary.session.events import PlannedJob
from armillary.session.job import Job
from armillary.session.measured import Quartiles, measured_in, run_forecast
from armillary.session.report import Report, last_steps, report_of
from armillary.session.run_folder import keep_decision, refuse_not_ended
from armillary.session.traffic_meter import OTHER, STEP, EdgeLabels, way_of
from armillary.transport.agreement import by_rank_zero

__all__ = ["Compared", "ComparedLine", "compare_run", "kept_report"]

FEWEST_STEPS = 2  # from the end of one to that of the next a step is timed


def kept_report(run: Job, folder: Path) -> Report:
    """Collective; rank 0 writes. A job that is started once more when it has ended takes no step: what it left before
    stays, and rank 0 warns.

    Raises:
        ValueError: the run does not know what its plan was made from, or the folder cannot be written.
    """
    trace = last_steps(run)
    report = report_of(run, trace)
    profile, topology = run.job.profile, run.job.topology
    if profile is None or topology is None:
        raise ValueError(
            "run.report: the run does not know what its plan was made from, which compare plays; give attach "
            "profile=... and topology=... (parallelize does, once its watched steps are over)"
        )
    if report.steps < FEWEST_STEPS:
        if run.rank == 0:
            warn(
                f"run.report: the plan has taken {report.steps} steps, and a folder to compare wants {FEWEST_STEPS} at "
                f"least; {folder} is left as it is",
                stacklevel=1,
            )
        return report
    last = run.transport.step
    told = {
        "comparison": [asdict(line) for line in report.lines], "forecast": asdict(run.plan.forecast),
        "peak_bytes": None, "resident_bytes": None, "step_seconds": report.step_seconds,
        "from_step": last - report.steps, "steps": last,
    }  # fmt: skip
    decided = PlannedJob(profile, topology, run.plan)
    by_rank_zero(run.transport, lambda: _write(folder, decided, trace, json.dumps(told, indent=2)))
    return report


def _write(folder: Path, decided: PlannedJob, trace: Trace, summary: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        keep_decision(folder, decided)
        trace.save(folder / "trace.json")
        (folder / "summary.json").write_text(summary + "\n")
    except OSError as error:
        raise ValueError(f"run.report: cannot write to {folder} ({error.strerror}); give another folder") from None


PROCESS = "process"
UNTIMED = "forecast not known yet"
GONE = "gone between steps"


@dataclass(frozen=True)
class ComparedLine:
    """One group, one edge, the whole step, or the process. forecast: None for what is only shown. measured: its seconds
    are the median step's. outside: which of its figures are outside the band. middle: of steps. passes: figure -> why
    it passes all the same, where forecast and measured differ by more than the band."""

    group: str
    exchange: str
    forecast: Forecast | None
    measured: Forecast
    outside: tuple[str, ...]
    middle: Quartiles | None = None
    passes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """lines: in launch order, then edges, what is of no group, the whole step and the process."""

    band: Band
    lines: tuple[ComparedLine, ...]

    @property
    def is_within(self) -> bool:
        return not any(line.outside for line in self.lines)


@dataclass(frozen=True)
class _Summary:
    """What a run found out about itself at its end (`events.Ended`), as far as it is compared."""

    comparison: list[dict[str, Any]]
    forecast: Forecast
    peak_bytes: float | None  # None: nobody counted
    resident_bytes: float | None
    step_seconds: float
    steps: range

    @classmethod
    def load(cls, path: Path) -> "_Summary":
        found = json.loads(path.read_text())
        said = {name: found[name] for name in ("comparison", "peak_bytes", "resident_bytes", "step_seconds")}
        steps = range(found.get("from_step", 0), found.get("steps", 0))
        return cls(forecast=Forecast(**found["forecast"]), steps=steps, **said)


def compare_run(folder: Path, band: Band) -> Compared:
    """
    Raises:
        ValueError: a file is missing, or is of another plan or model.
    """
    refuse_not_ended(folder)
    plan: Plan = _file(folder, "plan", Plan)
    trace: Trace = _file(folder, "trace", Trace)
    summary: _Summary = _file(folder, "summary", _Summary)
    case = Case(_file(folder, "profile", Profile), _file(folder, "topology", Topology), assumptions_behind(plan))
    forecasts = run_forecast(plan, case, summary.steps)
    _refuse_other_plan(folder, plan, trace, summary)
    found, seen = measured_in(trace, plan), list[ComparedLine]()
    for line in summary.comparison:
        name, held = line["group"], Forecast(**line["measured"])
        middle = found.seconds(name)
        measured = replace(held, seconds=middle.median)
        seen.append(ComparedLine(name, line["exchange"], forecasts.groups.get(name), measured, (), middle))
    sent_bytes = sum(line.measured.sent_bytes for line in seen if line.forecast is not None)
    expected = Forecast(forecasts.step.sent_bytes, summary.forecast.memory_bytes, forecasts.step.seconds)
    peak_bytes = expected.memory_bytes if summary.peak_bytes is None else summary.peak_bytes
    whole = Forecast(sent_bytes, peak_bytes, summary.step_seconds)
    seen[len(plan.groups) : len(plan.groups)] = [
        ComparedLine(edge, "edge", forecast, Forecast(found.edge(edge).sent_bytes, 0.0, middle.median), (), middle)
        for edge, forecast in sorted(forecasts.edges.items(), key=lambda one: EdgeLabels.order(one[0]))
        for middle in [Quartiles.of([*found.edge(edge).seconds.values()])]
    ]
    shown = (expected, whole)
    if summary.peak_bytes is None:
        shown = replace(expected, memory_bytes=0.0), replace(whole, memory_bytes=0.0)
    seen.append(ComparedLine(STEP, "", *shown, ()))
    decided = forecasts.decided | ({STEP} if forecasts.decided else set())
    unjudged = {} if plan.is_timed else {"seconds": UNTIMED}
    of_schedule = {"memory_bytes": GONE} if forecasts.edges else {}
    lines = []
    for one in seen:
        skipped = unjudged | (of_schedule if one.group != STEP else {})
        lines.append(_judged(one, whole, band, one.group in decided, skipped))
    if summary.resident_bytes is not None:
        lines.append(ComparedLine(PROCESS, "", None, Forecast(memory_bytes=summary.resident_bytes), ()))
    return Compared(band, tuple(lines))


def _file(folder: Path, noun: str, kind: type[Any]) -> Any:
    return read_kept(folder / f"{noun}.json", kind, noun)


def _refuse_other_plan(folder: Path, plan: Plan, trace: Trace, summary: _Summary) -> None:
    planned = {group.name: way_of(plan, group) for group in plan.groups}
    carried = {line["group"]: line["exchange"] for line in summary.comparison if line["group"] != OTHER}
    if planned != carried:
        differing = sorted(set(planned.items()) ^ set(carried.items()))
        raise ValueError(
            f"compare: {folder}/plan.json is not the plan of this run: they differ in "
            f"{', '.join(f'{name} by {exchange}' for name, exchange in differing)}; put back the run's own plan"
        )
    if not has_clock(plan.schedule):
        raise ValueError(
            f"compare: under schedule {plan.schedule.name} nobody measures how long messages are under way; "
            "run.report() and the end of armillary train show the bytes, and how stale updates were"
        )
    known, edges = {*planned, *plan.parameters}, EdgeLabels(plan)
    if plan.workers > 1 and not any(label in known or edges.edge_of(label) for label in trace.groups):
        raise ValueError(f"compare: {folder}/trace.json has no request of any group of the plan; it is of another run")


def _judged(
    line: ComparedLine, whole: Forecast, band: Band, is_decided: bool, skipped: Mapping[str, str]
) -> ComparedLine:
    """The line with what is outside, and why the rest of it passes.

    Args:
        whole: of the step, as measured. is_decided: whether the data decide how much is sent. skipped: figures that are
            only shown, with the reason.
    """
    forecast, measured = line.forecast, line.measured
    if forecast is None:
        return line
    nearest = measured
    if line.middle is not None:
        nearest = replace(measured, seconds=line.middle.nearest(forecast.seconds))
    outside, passes = [], {}
    for name in ("sent_bytes", "memory_bytes", "seconds"):
        expected, seen, near, all_of_it, small = (
            getattr(one, name) for one in (forecast, measured, nearest, whole, band.small)
        )
        share = getattr(band, name)
        if abs(expected - seen) <= share * max(expected, seen):
            continue
        if name in skipped:
            passes[name] = skipped[name]
        elif name == "sent_bytes" and is_decided and abs(expected - seen) <= band.decided_bytes * max(expected, seen):
            passes[name] = f"the data decide, within {band.decided_bytes:.0%}"
        elif abs(expected - near) <= share * max(expected, near):
            passes[name] = "between the quartiles"
        elif abs(expected - near) <= small * all_of_it:
            passes[name] = f"less than {small:.1%} of the step"
        else:
            outside.append(name)
    return replace(line, outside=tuple(outside), passes=passes)
