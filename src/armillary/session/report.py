"""What the groups of a plan really sent, held and took, beside the forecast: the same type, so that the two can be
subtracted."""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.facts.plan import Forecast
from armillary.facts.table import Table
from armillary.session.health import Health, health_of, health_table
from armillary.session.job import Job
from armillary.session.tally import OTHER, Tally

__all__ = ["Comparison", "Report", "compare", "comparison_table", "report_of"]


@dataclass(frozen=True)
class Comparison:
    """One line of forecast beside measured, per worker and step (mean over workers)."""

    group: str
    exchange: str
    forecast: Forecast
    measured: Forecast


@dataclass(frozen=True)
class Report:
    """Forecast beside measured for every group, after so many steps since the plan came into force; and how groups fare
    that are not exact. step_seconds: of a whole step, from its end to that of the next, the median of the last ones in
    the mean over workers; forecast_seconds: what the plan expected of it. 0 where nobody knows."""

    steps: int
    lines: tuple[Comparison, ...]
    health: tuple[Health, ...] = ()
    step_seconds: float = 0.0
    forecast_seconds: float = 0.0

    def __str__(self) -> str:
        forecast, measured = Forecast(), Forecast()
        for line in self.lines:
            forecast, measured = forecast + line.forecast, measured + line.measured
        table = comparison_table((*self.lines, Comparison("all", "", forecast, measured)))
        text = f"after {self.steps} steps{self._step_words()}\n{table}"
        return f"{text}\n\n{health_table(self.health)}" if self.health else text

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
    return Report(run.tally.steps, lines, health, sum(seconds) / len(seconds), run.plan.step_seconds)


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
