"""What the groups of a plan sent, held and took, beside the forecast, in one type that can be subtracted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from armillary.planning.pricing import Case, assumptions_behind
from armillary.plans.group import Forecast
from armillary.plans.plan_text import UNKNOWN
from armillary.plans.trace import Trace
from armillary.plans.units import Table
from armillary.session.health import Health, health_of, health_table
from armillary.session.job import Job
from armillary.session.measured import MeasuredEdge, MeasuredSeconds, Quartiles, RunForecast, measured_in, run_forecast
from armillary.session.traffic_meter import OTHER, EdgeLabels, TrafficMeter, everyones_trace, way_of
from armillary.transport.agreement import by_rank_zero

__all__ = [
    "Comparison",
    "EdgeLine",
    "Report",
    "compare",
    "comparison_table",
    "held_by_group",
    "last_steps",
    "report_of",
]

LEGEND = """sent, memory: per worker and step, the mean over workers in all steps of this plan; time: of a group in
flight, since the last rank had asked, the median of the last steps; the plan's own is of the group alone"""


@dataclass(frozen=True)
class Comparison:
    """One line of forecast beside measured, per worker and step (mean over workers)."""

    group: str
    exchange: str
    forecast: Forecast
    measured: Forecast


@dataclass(frozen=True)
class EdgeLine:
    """What goes from stage to stage, or a stage from rank to rank, as in a `Comparison`. forecast: None where nobody
    gave the run its profile and topology."""

    name: str
    forecast: Forecast | None
    measured: Forecast


@dataclass(frozen=True)
class Report:
    """Forecast beside measured for every group, after so many steps since the plan came into force; and how groups fare
    that are not exact. edges: of the schedule's messages; groups are charged with what their stage sends. step_seconds:
    of a whole step, from its end to that of the next, the median of the last ones in the mean over workers;
    forecast_seconds: what is expected of it. 0 where nobody knows, None where it is not known yet. beside: what only
    this kind of run has to tell."""

    steps: int
    lines: tuple[Comparison, ...]
    health: tuple[Health, ...] = ()
    step_seconds: float = 0.0
    forecast_seconds: float | None = 0.0
    edges: tuple[EdgeLine, ...] = ()
    beside: tuple[Table, ...] = ()

    def __str__(self) -> str:
        forecast, measured = Forecast(), Forecast()
        for line in self.lines:
            forecast, measured = forecast + line.forecast, measured + line.measured
        table = comparison_table((*self.lines, Comparison("all", "", forecast, measured)))
        if self.step_seconds and self.forecast_seconds:
            rest = _left(self.forecast_seconds - forecast.seconds), _left(self.step_seconds - measured.seconds)
            table = replace(table, rows=[*table.rows, ("rest of the step", *[""] * 5, *rest)])
        text = f"after {self.steps} steps{self._step_words()}\n{table}\n{LEGEND}"
        parts = [_edge_table(self.edges)] if self.edges else []
        parts += [health_table(self.health)] if self.health else []
        parts += self.beside
        return "\n\n".join(map(str, (text, *parts)))

    def _step_words(self) -> str:
        if not self.step_seconds:
            return ""
        forecast = f" (forecast {self.forecast_seconds * 1e3:.2f} ms)" if self.forecast_seconds else ""
        if self.forecast_seconds is None:
            forecast = f" (forecast {UNKNOWN})"
        return f"; a step took {self.step_seconds * 1e3:.2f} ms{forecast}"


def _left(seconds: float) -> str:
    """What of a step no request was in flight in; nothing can be said where they overlap by more than that."""
    return f"{seconds * 1e3:,.2f}" if seconds > 0 else "-"


def last_steps(run: Job) -> Trace:
    """Collective: what was asked for in the last steps under this plan."""
    run.count()
    return everyones_trace(run.traffic_meter.records, run.transport)


def report_of(run: Job, trace: Trace) -> Report:
    """Collective. Seconds are those of the median step among the last, since the last rank had asked; forecasts are by
    the clock where the run knows what the plan was made from.

    Args:
        trace: `last_steps`.
    """
    seconds = run.transport.share(run.traffic_meter.step_seconds)
    expected, seen = _expected(run, run.traffic_meter), measured_in(trace, run.plan)
    lines, health = _compared(run, run.traffic_meter, expected, seen), health_of(run)
    step: float | None = None  # not known yet
    if run.plan.is_timed:
        step = run.plan.step_seconds if expected is None else expected.step.seconds
    edges = _edges(seen, {} if expected is None else expected.edges)
    mean = sum(seconds) / len(seconds)
    return Report(run.traffic_meter.steps, lines, health, mean, step, edges, tuple(run.tables_of_report()))


def compare(run: Job, traffic_meter: TrafficMeter, trace: Trace) -> tuple[Comparison, ...]:
    """Collective: the lines of `report_of`, of the steps that are counted in `traffic_meter` and recorded in
    `trace`."""
    return _compared(run, traffic_meter, _expected(run, traffic_meter), measured_in(trace, run.plan))


def _compared(
    run: Job, traffic_meter: TrafficMeter, expected: RunForecast | None, seen: MeasuredSeconds
) -> tuple[Comparison, ...]:
    groups = {} if expected is None else expected.groups
    lines = (replace(line, forecast=groups.get(line.group, line.forecast)) for line in _counted(run, traffic_meter))
    if not traffic_meter.is_timed:
        return tuple(replace(line, measured=replace(line.measured, seconds=math.nan)) for line in lines)
    return tuple(_in_flight(line, seen.groups.get(line.group)) for line in lines)


def _expected(run: Job, traffic_meter: TrafficMeter) -> RunForecast | None:
    """Collective."""
    return by_rank_zero(run.transport, lambda: _foreseen(run, traffic_meter))


def _foreseen(run: Job, traffic_meter: TrafficMeter) -> RunForecast | None:
    profile, topology = run.job.profile, run.job.topology
    if profile is None or topology is None or not run.plan.is_timed:
        return None
    steps = range(run.transport.step - traffic_meter.steps, run.transport.step)
    try:
        return run_forecast(run.plan, Case(profile, topology, assumptions_behind(run.plan)), steps)
    except ValueError:  # of a plan that nobody priced, or that is not played
        return None


def _in_flight(line: Comparison, seen: Quartiles | None) -> Comparison:
    return replace(line, measured=replace(line.measured, seconds=0.0 if seen is None else seen.median))


def _edges(seen: MeasuredSeconds, expected: Mapping[str, Forecast]) -> tuple[EdgeLine, ...]:
    names = sorted({*seen.edges, *expected}, key=EdgeLabels.order)
    return tuple(EdgeLine(name, expected.get(name), _measured(seen.edge(name))) for name in names)


def _measured(edge: MeasuredEdge) -> Forecast:
    return Forecast(edge.sent_bytes, 0.0, Quartiles.of([*edge.seconds.values()]).median)


def _edge_table(edges: Sequence[EdgeLine]) -> Table:
    rows = [(edge.name, *_edge_cells(edge)) for edge in edges]
    return Table(("of which, by edge", *_paired("sent kB/step", "time ms")), rows)


def _edge_cells(edge: EdgeLine) -> tuple[str, ...]:
    expected, seen = edge.forecast, edge.measured
    sent = "-" if expected is None else f"{expected.sent_bytes / 1e3:,.1f}"
    flown = "-" if expected is None else f"{expected.seconds * 1e3:,.2f}"
    return sent, f"{seen.sent_bytes / 1e3:,.1f}", flown, f"{seen.seconds * 1e3:,.2f}"


def comparison_table(lines: Sequence[Comparison]) -> Table:
    """Bytes sent, memory and seconds per step, one row a line."""
    rows = [(line.group, line.exchange, *_cells(line)) for line in lines]
    return Table(("group", "exchange", *_paired("sent kB/step", "memory MiB", "time ms")), rows, (0, 1))


def _paired(*figures: str) -> tuple[str, ...]:
    return tuple(cell for figure in figures for cell in (f"{figure} forecast", "measured"))


def _cells(line: Comparison) -> tuple[str, ...]:
    units = (("sent_bytes", 1e3, 1), ("memory_bytes", 1 << 20, 1), ("seconds", 1e-3, 2))
    pairs = [
        tuple(_figure(getattr(one, name) / unit, digits) for one in (line.forecast, line.measured))
        for name, unit, digits in units
    ]
    is_foreseen = line.group != OTHER or line.forecast != Forecast()  # only a clock foresees what is of no group
    return tuple(cell for forecast, measured in pairs for cell in (forecast if is_foreseen else "-", measured))


def _figure(value: float, digits: int) -> str:
    return "not known" if math.isnan(value) else f"{value:,.{digits}f}"


def held_by_group(run: Job) -> dict[str, float]:
    """Bytes that this rank holds between two steps; a storage that several tensors share counts once. What is of no
    group of the plan is with its first."""
    group_of = {name: group.name for group in run.plan.groups for name in group.parameters}
    found = {group.name: 0.0 for group in run.plan.groups}
    kept = [one for one in run.held_tensors() if isinstance(one.tensor, Tensor)]
    for name, tensor in {one.tensor.untyped_storage().data_ptr(): one for one in kept}.values():
        found[group_of.get(name, run.plan.groups[0].name)] += tensor.untyped_storage().nbytes()
    for group, beside in run.beside_bytes().items():
        found[group] += beside
    return found


def _counted(run: Job, traffic_meter: TrafficMeter) -> tuple[Comparison, ...]:
    """Collective: the plan's forecasts beside means over workers."""
    held, spent = held_by_group(run), traffic_meter.per_step()
    mine = {name: (*spent.get(name, (0.0, 0.0)), held.get(name, 0.0)) for name in {**held, **spent}}
    everyones = run.transport.share(mine)
    lines = []
    for group in run.plan.groups:
        measured = _mean([theirs.get(group.name, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(group.name, way_of(run.plan, group), group.forecast, measured))
    if any(OTHER in theirs for theirs in everyones):
        measured = _mean([theirs.get(OTHER, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(OTHER, "", Forecast(), measured))
    return tuple(lines)


def _mean(spent: list[tuple[float, float, float]]) -> Forecast:
    sent, seconds, held = (sum(column) / len(spent) for column in zip(*spent, strict=True))
    return Forecast(sent, held, seconds)
