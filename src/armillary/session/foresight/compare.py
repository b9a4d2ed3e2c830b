"""A run's forecast beside what was measured, group by group, and whether the two agree within a band.

Bytes and memory of a group are the run's means over workers. Seconds of a group are those its requests were in flight,
which depends on what hides them: so the forecast plays the plan against a clock (`planning/simulator`), on which all
ranks ask at once, and the measured ones count from when the last rank had asked (`Trace.joint_seconds`).

Under a schedule whose instructions are played (`planning/staged_clock`) each edge has a line too, letters both ways:
bytes and seconds from the trace. They are a part of the group that is charged with what its stage sends. Memory of such
a group is shown without a band, since the plan counts its gradient, which is gone between two steps.

Steps of a run are not alike: what crosses competes with compute for processors, and a group takes 5 ms in one step and
7 in the next while the step's own time holds. So a group's seconds are a stretch, the *middle half* of its steps (first
to third quartile): they are inside where the forecast lies within the band of that stretch. The whole step is held to
its median.

Memory of the step is that of its tensors in its fullest moment: forecast from a plain step that the profile watched in
one process, measured in a step of the run. What the process needs beside tensors (scratch memory of libraries, gloo's
buffers, what the allocator keeps) nobody forecasts; it is shown without a band.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.facts.layout import layout_of
from armillary.facts.plan import Choice, Forecast, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.facts.trace import Trace
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.simulation import Simulation
from armillary.planning.simulator import LOOK_UPS, simulate
from armillary.planning.staged_clock import ALL_REDUCE
from armillary.schedules.edge import codes_of
from armillary.schedules.registry import options_of, owns_loop
from armillary.session.edge_labels import EdgeLabels, way_of
from armillary.session.folder import read_kept
from armillary.session.foresight.edges_seen import SeenEdge, edges_seen
from armillary.session.tally import OTHER, STEP

__all__ = ["Band", "Compared", "ComparedLine", "Middle", "compare_run"]

PROCESS = "process"
# Of what the band leaves to the whole step: as much of it may a group use up that is out by more than its own band.
# With the default bands: 0.1 % of the step's bytes, which are counted, and 1 % of its memory and of its seconds.
SMALL_PARTS = {"sent_bytes": 1 / 20, "memory_bytes": 1 / 10, "seconds": 1 / 15}


@dataclass(frozen=True)
class Band:
    """Largest difference between forecast and measured, as a share of the larger of the two.

    decided_bytes: instead of sent_bytes, where the data decide how much is sent.
    """

    sent_bytes: float = 0.02
    memory_bytes: float = 0.10
    seconds: float = 0.15
    decided_bytes: float = 0.30

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not 0 <= value <= 1}
        if wrong:
            raise ValueError(f"compare: a band is a share between 0 and 1, got {wrong}")

    @property
    def small(self) -> Forecast:
        """Shares of the whole step: differences of a group below them are let pass."""
        return Forecast(**{name: part * getattr(self, name) for name, part in SMALL_PARTS.items()})


@dataclass(frozen=True)
class Middle:
    """Seconds of the middle half of steps: first quartile, median, third quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Middle":
        if len(seconds) < 2:
            return cls(*(3 * list(seconds) or [0.0, 0.0, 0.0]))
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def nearest(self, seconds: float) -> float:
        return min(max(seconds, self.low), self.high)


@dataclass(frozen=True)
class ComparedLine:
    """One group, one edge, the whole step, or the process. forecast: None for what is only shown. measured: its seconds
    are the median step's. outside: which of its figures are outside the band. middle: of steps."""

    group: str
    exchange: str
    forecast: Forecast | None
    measured: Forecast
    outside: tuple[str, ...]
    middle: Middle | None = None


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
    peak_bytes: float
    resident_bytes: float
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
    plan: Plan = _file(folder, "plan", Plan)
    trace: Trace = _file(folder, "trace", Trace)
    summary: _Summary = _file(folder, "summary", _Summary)
    forecasts = _forecasts(folder, plan, summary.steps)
    _refuse_other_plan(folder, plan, trace, summary)
    edges = _edges_in(trace, plan)
    spent = _seconds(trace, plan, edges)
    seen: list[ComparedLine] = []
    for line in summary.comparison:
        name, held = line["group"], Forecast(**line["measured"])
        middle = spent.get(name, Middle.of([]))
        measured = replace(held, seconds=middle.median)
        seen.append(ComparedLine(name, line["exchange"], forecasts.groups.get(name), measured, (), middle))
    sent_bytes = sum(line.measured.sent_bytes for line in seen if line.forecast is not None)
    whole = Forecast(sent_bytes, summary.peak_bytes, summary.step_seconds)
    expected = Forecast(forecasts.step.sent_bytes, summary.forecast.memory_bytes, forecasts.step.seconds)
    seen[len(plan.groups) : len(plan.groups)] = [
        ComparedLine(edge, "edge", forecast, Forecast(found.sent_bytes, 0.0, middle.median), (), middle)
        for edge, forecast in sorted(forecasts.edges.items(), key=lambda one: EdgeLabels.order(one[0]))
        for found in [edges.get(edge, SeenEdge({}, 0.0))]
        for middle in [Middle.of([*found.seconds.values()])]
    ]
    seen.append(ComparedLine(STEP, "", expected, whole, ()))
    decided = {group.name for group in plan.groups if _is_decided(group.exchange)} | forecasts.decided
    decided |= {STEP} if decided else set()
    lines = [replace(line, outside=_outside(line, whole, band, line.group in decided)) for line in seen]
    if forecasts.edges:
        lines = [line if line.group == STEP else _without_memory(line) for line in lines]
    process = ComparedLine(PROCESS, "", None, Forecast(memory_bytes=summary.resident_bytes), ())
    return Compared(band, (*lines, process))


def _file(folder: Path, noun: str, kind: type[Any]) -> Any:
    path = folder / f"{noun}.json"
    if not path.is_file():
        raise ValueError(
            f"compare: {folder} has no {path.name}; give the folder of a run that ended, as `armillary train` leaves "
            "it. A script leaves none: there, print(run.report()) before run.close()"
        )
    return read_kept(path, kind, noun)


def _refuse_other_plan(folder: Path, plan: Plan, trace: Trace, summary: _Summary) -> None:
    planned = {group.name: way_of(plan, group) for group in plan.groups}
    carried = {line["group"]: line["exchange"] for line in summary.comparison if line["group"] != OTHER}
    if planned != carried:
        differing = sorted(set(planned.items()) ^ set(carried.items()))
        raise ValueError(
            f"compare: {folder}/plan.json is not the plan of this run: they differ in "
            f"{', '.join(f'{name} by {exchange}' for name, exchange in differing)}; put back the run's own plan"
        )
    known, edges = {*planned, *plan.parameters}, EdgeLabels(plan)
    if plan.workers > 1 and not any(label in known or edges.edge_of(label) for label in trace.groups):
        raise ValueError(f"compare: {folder}/trace.json has no request of any group of the plan; it is of another run")


@dataclass(frozen=True)
class _Forecasts:
    """By group and by edge, and of the step. decided: where the data decide how much an edge sends."""

    groups: dict[str, Forecast]
    step: Forecast
    edges: dict[str, Forecast] = field(default_factory=dict)
    decided: frozenset[str] = frozenset()


def _forecasts(folder: Path, plan: Plan, steps: range) -> _Forecasts:
    """
    Raises:
        ValueError: the plan's schedule is not played.
    """
    held = {group.name: group.forecast for group in plan.groups}
    topology, profile = _file(folder, "topology", Topology), _file(folder, "profile", Profile)
    case = Case(profile, topology.of(plan.workers), assumptions_behind(plan))
    played = simulate(plan, case)
    if owns_loop(plan.schedule):
        return _foreseen_by_edge(plan, played)
    sent, flown = _sent_bytes(plan, played) | _bytes_by_push(plan, case, steps), played.in_flight_seconds
    forecast = {name: Forecast(sent[name], one.memory_bytes, flown.get(name, 0.0)) for name, one in held.items()}
    forecast[OTHER] = Forecast(sent[LOOK_UPS], 0.0, flown.get(LOOK_UPS, 0.0))
    return _Forecasts(forecast, Forecast(sum(sent.values()), 0.0, played.step_seconds))


def _foreseen_by_edge(plan: Plan, played: Simulation) -> _Forecasts:
    """Groups as the plan has them, in flight as played; edges as played."""
    names, edges = EdgeLabels(plan), dict[str, Forecast]()
    flown = dict.fromkeys((group.name for group in plan.groups), 0.0)
    for flight in played.flights:
        label = flight.group if flight.action == ALL_REDUCE else f"{flight.action} of {flight.group}"
        flown[names.group_of(label)] += flight.seconds
        if edge := names.edge_of(label):
            edges[edge] = edges.get(edge, Forecast()) + Forecast(flight.sent_bytes, 0.0, flight.seconds)
    groups = {group.name: replace(group.forecast, seconds=flown[group.name]) for group in plan.groups}
    codes = codes_of(options_of(plan).edges)
    decided = frozenset(f"{what} of stage {stage}" for (what, stage), code in codes.items() if not code.is_fixed)
    decided |= {names.group_of(edge) for edge in decided}
    return _Forecasts(groups, Forecast(plan.forecast.sent_bytes, 0.0, played.step_seconds), edges, decided)


def _sent_bytes(plan: Plan, played: Simulation) -> dict[str, float]:
    """As the plan has them, by group. It charges tables with headers of look-ups, which are counted by themselves: so
    these are taken out as the clock has them, if the two agree on the sum."""
    planned = {group.name: group.forecast.sent_bytes for group in plan.groups}
    look_ups = played.sent_bytes.get(LOOK_UPS, 0.0)
    pulled = [group.name for group in plan.groups if group.layout == "row_sharded"]
    alone = {name: played.sent_bytes.get(name, 0.0) for name in pulled}
    if math.isclose(sum(planned[name] for name in pulled), sum(alone.values()) + look_ups, rel_tol=1e-6):
        planned |= alone
    return {**planned, LOOK_UPS: look_ups}


def _bytes_by_push(plan: Plan, case: Case, steps: range) -> dict[str, float]:
    """A step, by group, in the mean over these steps: of groups whose pushes are not all alike."""
    found = {}
    for group in plan.groups:
        if _is_dense(group.exchange):
            exchange = build_dense(group.own_exchange.name, **group.own_exchange.options)
            if exchange.bytes_after is not None and steps:
                facts = [case.profile.parameter(name) for name in group.parameters]
                layout = layout_of(facts, exchange.align, exchange.is_guarded)
                due = [step + 1 for step in range(steps.stop) if exchange.due(step + 1)]
                pushes = [number for number, step in enumerate(due) if step > steps.start]
                sent = [exchange.bytes_after(layout, case.topology, number) for number in pushes]
                found[group.name] = sum(map(sum, sent)) / plan.workers / len(steps)
    return found


def _is_dense(choice: Choice | None) -> bool:
    return choice is not None and choice.name in dense_exchanges()


def _edges_in(trace: Trace, plan: Plan) -> dict[str, SeenEdge]:
    return edges_seen(trace, plan) if owns_loop(plan.schedule) else {}


def _seconds(trace: Trace, plan: Plan, edges: Mapping[str, SeenEdge]) -> dict[str, Middle]:
    """Of steps, by group; requests that are of no group go together."""
    steps: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    names = EdgeLabels(plan)
    for (label, step), seconds in trace.joint_seconds().items():
        if not names.edge_of(label):
            steps[label if label == STEP else names.group_of(label)][f"step {step}"] += seconds
    for edge, seen in edges.items():
        for at, seconds in seen.seconds.items():
            steps[names.group_of(edge)][at] += seconds
    return {group: Middle.of([*spent.values()]) for group, spent in steps.items()}


def _is_decided(choice: Choice | None) -> bool:
    """Whether the data decide how much such an exchange sends."""
    if choice is None or not _is_dense(choice):
        return False
    exchange = build_dense(choice.name, **choice.options)
    return exchange.most_bytes is not None and exchange.bytes_after is None


def _without_memory(line: ComparedLine) -> ComparedLine:
    return replace(line, outside=tuple(name for name in line.outside if name != "memory_bytes"))


def _outside(line: ComparedLine, whole: Forecast, band: Band, is_decided: bool) -> tuple[str, ...]:
    found = []
    sent_bytes = max(band.sent_bytes, band.decided_bytes) if is_decided else band.sent_bytes
    shares = {"sent_bytes": sent_bytes, "memory_bytes": band.memory_bytes, "seconds": band.seconds}
    forecast, measured = line.forecast, line.measured
    if forecast is None:
        return ()
    if line.middle is not None:
        measured = replace(measured, seconds=line.middle.nearest(forecast.seconds))
    for name, share in shares.items():
        expected, seen, all_of_it, small = (getattr(one, name) for one in (forecast, measured, whole, band.small))
        difference = abs(expected - seen)
        if difference > share * max(expected, seen) and difference > small * all_of_it:
            found.append(name)
    return tuple(found)
