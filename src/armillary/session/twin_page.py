"""Two trainings on the same batches, on paper: the gap in words, seconds of a step, losses at equal steps; and files.

Losses are those of the same held-out batches at steps spread evenly, so that what differs between two of them is the
model. The spread over seeds says how far a gap can be trusted.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from textwrap import shorten
from typing import Any

import numpy as np

from armillary.plans.units import Page, Part, Table, bytes_text, page_text, seconds_text
from armillary.session.run_folder import can_draw, open_folder

__all__ = ["Gap", "Sent", "Side", "Sides", "Twin", "knots"]

ROWS = 10  # of the table of equal steps
STRETCHES = 50  # of a curve
LONGEST = 48  # characters of a name


def knots(steps: int) -> tuple[int, ...]:
    """After how many steps losses are taken: evenly spread, 0 and the last among them."""
    return tuple(sorted({round(steps * k / STRETCHES) for k in range(STRETCHES + 1)}))


@dataclass(frozen=True)
class Side:
    """One of the two trainings.

    Args of note:
        name: the exchanges by which its gradients go.
        step_seconds, sent_bytes: of one step, as forecast; bytes per worker.
        losses: by seed and knot, the mean of the held-out batches'.
    """

    name: str
    step_seconds: float
    sent_bytes: float
    losses: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Gap:
    """Both losses at a step, means over seeds.

    Args of note:
        gap: of the other less the exact one; above 0 where the other is behind.
        spread: its standard deviation over seeds; None of one seed.
    """

    at: float
    exact: float
    other: float
    gap: float
    spread: float | None


@dataclass(frozen=True)
class Sides:
    """The exact training, and the other one beside it, under as many seeds. steps: the knots of both."""

    exact: Side
    other: Side
    steps: tuple[int, ...]

    @property
    def seeds(self) -> int:
        return len(self.exact.losses)

    @property
    def last_step(self) -> int:
        return self.steps[-1]

    @property
    def faster(self) -> float:
        """How many steps of the other take as long as an exact one."""
        return self.exact.step_seconds / self.other.step_seconds

    @property
    def trouble(self) -> str:
        """Where losses are not finite; empty if all are."""
        said = []
        for side in (self.exact, self.other):
            for seed, losses in enumerate(side.losses):
                if not np.isfinite(losses).all():
                    place = int(np.argmin(np.isfinite(losses)))
                    said.append(
                        f"by {side.name} the loss is {losses[place]} after step {self.steps[place]}, seed {seed}"
                    )
        return "; ".join(said)

    @property
    def at_steps(self) -> tuple[Gap, ...]:
        """After equal steps."""
        places = sorted({round((len(self.steps) - 1) * k / ROWS) for k in range(ROWS + 1)})
        exact, other = np.array(self.exact.losses), np.array(self.other.losses)
        return tuple(_gap(float(self.steps[place]), exact[:, place], other[:, place]) for place in places)


def _gap(at: float, exact: np.ndarray, other: np.ndarray) -> Gap:
    """exact, other: (seeds,)."""
    with np.errstate(invalid="ignore"):  # both may be infinite
        gaps: Sequence[float] = (other - exact).tolist()
    spread = stdev(gaps) if len(gaps) > 1 and np.isfinite(gaps).all() else None
    return Gap(at, float(exact.mean()), float(other.mean()), fmean(gaps), spread)


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
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.5, 5.2 + 0.17 * len(self.notes)), dpi=120, layout="constrained")
        axes = figure.subplots()
        for side, color in ((self.sides.exact, "#2563a8"), (self.sides.other, "#c2570c")):
            seconds = [step * side.step_seconds for step in self.sides.steps]
            for losses in side.losses:  # thin lines are single seeds, thick ones their mean
                axes.plot(seconds, losses, color=color, linewidth=0.6, alpha=0.4)
            label = f"{shorten(side.name, LONGEST)}, {seconds_text(side.step_seconds)} a step"
            axes.plot(seconds, np.array(side.losses).mean(0), color=color, linewidth=2, label=label)
        axes.set(xlabel="forecast seconds on these links", ylabel="held-out loss")
        axes.legend(fontsize=8, frameon=False)
        figure.suptitle(f"{self.title}: seconds are forecast, not measured")
        notes = "\n".join(f"- {line}" for line in self.notes)
        figure.supxlabel(notes, fontsize=8.5, color="#444444", x=0.01, ha="left")
        figure.savefig(picture)
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
        return (
            f"After equal steps the held-out loss is {last.other:.5g}, that of the exact plan {last.exact:.5g}: "
            f"gap {_signed(last.gap)}{spread}; {speed}"
        )

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
