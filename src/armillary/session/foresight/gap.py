"""The gap between two trainings on the same batches: at equal steps, and at equal seconds.

Losses are those of the same held-out batches at steps spread evenly, so that what differs between two of them is the
model. Seconds are forecast ones: a step's simulated duration times its number. At equal steps both saw the same
batches; at equal seconds they did not, and the spread over seeds says how far a gap can be trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

__all__ = ["Gap", "Reached", "Side", "Sides", "Turn", "knots"]

ROWS = 10  # of the table of equal steps
SECONDS_ROWS = 6
STRETCHES = 50  # of a curve


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
    """Both losses at a step or a second, means over seeds.

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
class Reached:
    """The lowest loss that both come to, and the forecast second at which each does."""

    loss: float
    exact_seconds: float
    other_seconds: float


class Turn(NamedTuple):
    """From this second on the other has the lower loss, or else the higher one."""

    seconds: float
    is_ahead: bool


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

    @property
    def at_seconds(self) -> tuple[Gap, ...]:
        """At equal seconds, as long as both train."""
        return () if self.trouble else self._gaps(np.linspace(0, self.end_seconds, SECONDS_ROWS + 1))

    @property
    def end_seconds(self) -> float:
        """When the faster has done its steps."""
        return self.last_step * min(self.exact.step_seconds, self.other.step_seconds)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Who is ahead from when, at equal seconds; the first is where a gap opens. None where it never does, or a loss
        is not finite."""
        found: list[Turn] = []
        before: Gap | None = None
        for gap in () if self.trouble else self._gaps(self._shared()):
            if gap.gap == 0:
                before = gap
                continue
            is_ahead = gap.gap < 0
            if not found:
                found.append(Turn(gap.at if before is None else before.at, is_ahead))
            elif is_ahead != found[-1].is_ahead:
                assert before is not None
                share = before.gap / (before.gap - gap.gap)
                found.append(Turn(before.at + share * (gap.at - before.at), is_ahead))
            before = gap
        return tuple(found)

    @property
    def reached(self) -> Reached | None:
        """None where a loss is not finite, or one side never comes below the loss it began with."""
        if self.trouble:
            return None
        means = [np.array(side.losses).mean(0) for side in (self.exact, self.other)]
        loss = max(float(mean.min()) for mean in means)
        exact, other = (
            _first(self._seconds(side), mean, loss) for side, mean in zip((self.exact, self.other), means, strict=True)
        )
        return Reached(loss, exact, other) if min(exact, other) > 0 else None

    def _seconds(self, side: Side) -> np.ndarray:
        return np.array(self.steps) * side.step_seconds

    def _shared(self) -> np.ndarray:
        """Knots of both curves, in order, to the end of the faster."""
        every = np.unique(np.concatenate([self._seconds(self.exact), self._seconds(self.other)]))
        shared: np.ndarray = every[every <= self.end_seconds]
        return shared

    def _gaps(self, seconds: np.ndarray) -> tuple[Gap, ...]:
        exact, other = (
            np.stack([np.interp(seconds, self._seconds(side), losses) for losses in side.losses], 1)
            for side in (self.exact, self.other)
        )
        return tuple(_gap(*each) for each in zip(map(float, seconds), exact, other, strict=True))


def _gap(at: float, exact: np.ndarray, other: np.ndarray) -> Gap:
    """exact, other: (seeds,)."""
    with np.errstate(invalid="ignore"):  # both may be infinite
        gaps: Sequence[float] = (other - exact).tolist()
    spread = stdev(gaps) if len(gaps) > 1 and np.isfinite(gaps).all() else None
    return Gap(at, float(exact.mean()), float(other.mean()), fmean(gaps), spread)


def _first(seconds: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """When a curve first comes to that loss, between its knots."""
    place = int(np.argmax(losses <= loss))
    if place == 0:
        return float(seconds[0])
    return float(np.interp(-loss, -losses[place - 1 : place + 1], seconds[place - 1 : place + 1]))
