"""The gap between two trainings on the same batches, at equal steps.

Losses are those of the same held-out batches at steps spread evenly, so that what differs between two of them is the
model. Seconds are forecast ones: a step's simulated duration times its number. The spread over seeds says how far a
gap can be trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

__all__ = ["Gap", "Reached", "Side", "Sides", "knots"]

ROWS = 10  # of the table of equal steps
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
class Reached:
    """The lowest loss that both come to, and the forecast second at which each does."""

    loss: float
    exact_seconds: float
    other_seconds: float


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
