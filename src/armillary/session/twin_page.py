"""Two trainings on paper: the gap in words, what a step takes, losses at equal steps; and as files."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from armillary.plans.units import Page, Part, Table, bytes_text, page_text, seconds_text
from armillary.session.gap import Gap, Sides
from armillary.session.run_folder import can_draw, open_folder

__all__ = ["Sent", "Twin"]


@dataclass(frozen=True)
class Sent:
    """What a worker sends in a step by the exchanges that depart: as forecast, and as counted."""

    forecast_bytes: float
    counted_bytes: float


@dataclass(frozen=True)
class Twin:
    """Two trainings beside one another, the exact one and its twin, which is not exact. It prints.

    Args of note:
        subject: in words, what was trained and how; by which one training is told from another.
        sent: None where the twin is exact after all.
        notes: what else a reader must know, such as the links.
    """

    subject: str
    workers: int
    sides: Sides
    sent: Sent | None
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON; a number that is not finite is None."""
        sides = self.sides
        found: dict[str, Any] = _plain(
            {
                "subject": self.subject,
                "workers": self.workers,
                "steps": sides.last_step,
                "seeds": sides.seeds,
                "gap_at_steps": [asdict(one) for one in sides.at_steps],
                "reached": None if sides.reached is None else asdict(sides.reached),
                "departing": None if self.sent is None else asdict(self.sent),
                "notes": self.notes,
                "knots": sides.steps,
                "exact": asdict(sides.exact),
                "twin": asdict(sides.other),
            }
        )
        return found

    def save(self, folder: str | Path) -> list[Path]:
        """Writes twin.json, which holds every loss, and twin.png, if matplotlib is installed; their paths.

        Raises:
            ValueError: the folder cannot be written.
        """
        open_folder(Path(folder))
        text, picture = Path(folder) / "twin.json", Path(folder) / "twin.png"
        text.write_text(json.dumps(self.facts()) + "\n")
        if not can_draw(picture):
            return [text]
        from armillary.session.plots import plot_twin

        plot_twin(self.sides, self.title, self.notes).savefig(picture)
        return [text, picture]

    @property
    def title(self) -> str:
        return f"{self.subject}, {self.sides.seeds} seed{'s' if self.sides.seeds > 1 else ''}"

    def page(self) -> Page:
        """What it prints."""
        sides, name = self.sides, self.sides.other.name
        parts: list[Part] = [f"{self.title}. {self._verdict()}", self._forecasts()]
        spread = "spread: of the gap, over seeds" if sides.seeds > 1 else "of one seed no spread is known"
        parts += [f"held-out loss at equal steps; {spread}", self._rows_at_steps()]
        if self.sent is not None:
            counted, forecast = bytes_text(self.sent.counted_bytes), bytes_text(self.sent.forecast_bytes)
            said = f"{name} sent {counted} a worker and step, counted; {forecast} were forecast"
            parts.append(said if counted == forecast else f"{said}. Its step is priced with what was counted")
        return (*parts, *self.notes)

    def __str__(self) -> str:
        return page_text(self.page())

    def _verdict(self) -> str:
        sides, last = self.sides, self.sides.at_steps[-1]
        speed = f"a step is forecast to take {seconds_text(sides.other.step_seconds)} instead of "
        speed += f"{seconds_text(sides.exact.step_seconds)} ({sides.faster:.2f}x)"
        if sides.trouble:
            return f"NOT finite: {sides.trouble}; {speed}"
        spread = "" if last.spread is None else f" (spread {last.spread:.2g})"
        words = f"After equal steps the held-out loss is {last.other:.5g}, that of the exact plan {last.exact:.5g}: "
        words += f"gap {_signed(last.gap)}{spread}; {speed}"
        if (both := sides.reached) is not None:
            words += (
                f"; a loss of {both.loss:.5g}, which both reach, takes it {_seconds(both.other_seconds)} instead of "
                f"{_seconds(both.exact_seconds)} ({both.exact_seconds / both.other_seconds:.2f}x)"
            )
        return words

    def _forecasts(self) -> Table:
        rows, steps = [], self.sides.last_step
        for which, one in (("exact", self.sides.exact), ("twin", self.sides.other)):
            step = (seconds_text(one.step_seconds), bytes_text(one.sent_bytes))
            rows.append((which, one.name, *step, _seconds(one.step_seconds * steps)))
        return Table(("forecast", "exchanges", "a step", "sent a worker", f"{steps} steps"), rows, (0, 1))

    def _rows_at_steps(self) -> Table:
        rows = [(f"{one.at:.0f}", *_cells(one)) for one in self.sides.at_steps]
        return Table(("step", "exact", "twin", "gap", "spread"), rows, ())


def _plain(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return {name: _plain(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_plain(item) for item in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def _cells(gap: Gap) -> tuple[str, ...]:
    spread = "-" if gap.spread is None else f"{gap.spread:.2g}"
    return f"{gap.exact:.5g}", f"{gap.other:.5g}", _signed(gap.gap), spread


def _signed(gap: float) -> str:
    return f"{gap:+.2g}" if gap else "0"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
