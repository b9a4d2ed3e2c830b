"""What a training run tells as it goes. Values only; who listens decides what to show."""

from dataclasses import dataclass
from pathlib import Path

from armillary.facts.plan import Forecast, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.session.tally import Comparison

__all__ = ["Decided", "Ended", "Evaluated", "Event", "Progress", "Resumed", "Saved", "Warned"]


@dataclass(frozen=True)
class Decided:
    """The facts and the plan made of them; the same on every rank."""

    profile: Profile
    topology: Topology
    plan: Plan


@dataclass(frozen=True)
class Resumed:
    """Training goes on after `step` steps."""

    step: int
    path: Path


@dataclass(frozen=True)
class Warned:
    """Something is probably not meant."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Means over the steps since the last one and over all workers. sent_bytes: per worker and step."""

    step: int
    loss: float
    samples_per_second: float
    sent_bytes: float


@dataclass(frozen=True)
class Evaluated:
    """Held-out metrics after `step` steps. is_whole: over all of the split, not a glance at some batches."""

    step: int
    metrics: dict[str, float]
    is_whole: bool


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete."""

    step: int
    path: Path


@dataclass(frozen=True)
class Ended:
    """What came of the run.

    forecast, step_seconds: of a whole step (mean wall time). resident_bytes: of the largest worker at its
    peak, apart from what its process held before training besides the plan's tensors.
    """

    steps: int
    metrics: dict[str, float]
    baseline: dict[str, float]
    comparison: tuple[Comparison, ...]
    forecast: Forecast
    step_seconds: float
    samples_per_second: float
    resident_bytes: float


Event = Decided | Resumed | Warned | Progress | Evaluated | Saved | Ended
