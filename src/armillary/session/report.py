"""What the groups of a plan really sent, held and took, beside the forecast: the same type, so that the two can be
subtracted."""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.facts.plan import Forecast
from armillary.facts.table import Table
from armillary.session.health import Health, health_of, health_table
from armillary.session.job import Job
from armillary.session.tally import OTHER, Tally

__all__ = ["Comparison", "EdgeSent", "Report", "compare", "comparison_table", "report_of"]


@dataclass(frozen=True)
class Comparison:
    """One line of forecast beside measured, per worker and step (mean over workers)."""

    group: str
    exchange: str
    forecast: Forecast
    measured: Forecast


@dataclass(frozen=True)
class EdgeSent:
    """What goes from stage to stage, or a stage from rank to rank: per worker and step (mean over workers)."""

    name: str
    sent_bytes: float
    waited_seconds: float


@dataclass(frozen=True)
class Report:
    """Forecast beside measured for every group, after so many steps since the plan came into force; and how groups fare
    that are not exact. edges: bytes and seconds waited of the schedule's messages; groups are charged with what their
    stage sends of them. step_seconds: of a whole step, from its end to that of the next, the median of the last ones in
    the mean over workers; forecast_seconds: what the plan expected of it. 0 where nobody knows."""

    steps: int
    lines: tuple[Comparison, ...]
    health: tuple[Health, ...] = ()
    step_seconds: float = 0.0
    forecast_seconds: float = 0.0
    edges: tuple[EdgeSent, ...] = ()

    def __str__(self) -> str:
        forecast, measured = Forecast(), Forecast()
        for line in self.lines:
            forecast, measured = forecast + line.forecast, measured + line.measured
        table = comparison_table((*self.lines, Comparison("all", "", forecast, measured)))
        text = f"after {self.steps} steps{self._step_words()}\n{table}"
        parts = [_edge_table(self.edges)] if self.edges else []
        parts += [health_table(self.health)] if self.health else []
        return "\n\n".join(map(str, (text, *parts)))

    def _step_words(self) -> str:
        if not self.step_seconds:
            return ""
        forecast = f" (forecast {self.forecast_seconds * 1e3:.2f} ms)" if self.forecast_seconds else ""
        return f"; a step took {self.step_seconds * 1e3:.2f} ms{forecast}"


def report_of(run: Job) -> Report:
    """Collective."""
    run.count()
    seconds = run.transport.share(run.tally.step_seconds)
    lines, health = compare(run, run.tally), health_of(run)
    edges = _edges(run)
    return Report(run.tally.steps, lines, health, sum(seconds) / len(seconds), run.plan.step_seconds, edges)


def _edges(run: Job) -> tuple[EdgeSent, ...]:
    everyones = run.transport.share(run.tally.edges)
    steps = max(run.tally.steps, 1) * len(everyones)
    names = sorted({name for theirs in everyones for name in theirs})
    pairs = {name: [theirs.get(name, (0.0, 0.0)) for theirs in everyones] for name in names}
    return tuple(
        EdgeSent(name, sum(sent for sent, _ in told) / steps, sum(waited for _, waited in told) / steps)
        for name, told in pairs.items()
    )


def _edge_table(edges: Sequence[EdgeSent]) -> Table:
    rows = [(edge.name, f"{edge.sent_bytes / 1e3:,.1f}", f"{edge.waited_seconds * 1e3:,.2f}") for edge in edges]
    return Table(("of which, by edge", "sent kB/step", "waited ms"), rows)


def comparison_table(lines: Sequence[Comparison]) -> Table:
    """Bytes sent, memory and seconds per step, one row a line."""
    rows = [(line.group, line.exchange, *_cells(line.forecast, line.measured)) for line in lines]
    pairs = ("sent kB/step", "memory MiB", "time ms")
    header = ("forecast : measured", "exchange", *(cell for pair in pairs for cell in (pair, ":")))
    return Table(header, rows, (0, 1))


def _cells(forecast: Forecast, measured: Forecast) -> tuple[str, ...]:
    units = (("sent_bytes", 1e3, 1), ("memory_bytes", 1 << 20, 1), ("seconds", 1e-3, 2))
    return tuple(
        f"{getattr(one, name) / unit:,.{digits}f}" for name, unit, digits in units for one in (forecast, measured)
    )


def compare(run: Job, tally: Tally) -> tuple[Comparison, ...]:
    """Forecast beside measured, measured as the mean over workers. Every rank must call it."""
    held, spent = run.held_bytes(), tally.per_step()
    mine = {name: (*spent.get(name, (0.0, 0.0)), held.get(name, 0.0)) for name in {**held, **spent}}
    everyones = run.transport.share(mine)
    lines = []
    for group, way, forecast in run.forecasts():
        measured = _mean([theirs.get(group, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(group, way, forecast, measured))
    if any(OTHER in theirs for theirs in everyones):
        measured = _mean([theirs.get(OTHER, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(OTHER, "", Forecast(), measured))
    return tuple(lines)


def _mean(spent: list[tuple[float, float, float]]) -> Forecast:
    sent, seconds, held = (sum(column) / len(spent) for column in zip(*spent, strict=True))
    return Forecast(sent, held, seconds)
