"""What a training run tells as it goes. Values only; who listens decides what to show."""

from dataclasses import dataclass
from pathlib import Path

from armillary.plans.group import Forecast
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import Table
from armillary.session.health import Health
from armillary.session.report import Comparison

__all__ = [
    "Ended",
    "Evaluated",
    "Event",
    "NothingLeft",
    "PlannedJob",
    "Progress",
    "Resumed",
    "Saved",
    "Warned",
]  # fmt: skip


@dataclass(frozen=True)
class PlannedJob:
    """The facts and the plan made of them; the same on every rank."""

    profile: Profile
    topology: Topology
    plan: Plan


@dataclass(frozen=True)
class Resumed:
    """Training goes on after `step` steps. remark: in what it is not as it was saved."""

    step: int
    path: Path
    remark: str = ""


@dataclass(frozen=True)
class NothingLeft:
    """The run had come to its last step before; its folder stays as it was."""

    steps: int


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

    forecast, step_seconds: of a whole step (median wall time on rank 0). peak_bytes: of tensors in the fullest moment
    of a watched step, on the largest worker: those held between steps, and those made in it. resident_bytes: of the
    largest worker's process at its peak, apart from what it held before training besides the plan's tensors; at least
    these, since a process may give back what it held before. from_step: after which the figures begin. health: of the
    groups that are not exact. beside: what only this kind of run has to tell.
    """

    steps: int
    metrics: dict[str, float]
    baseline: dict[str, float]
    comparison: tuple[Comparison, ...]
    forecast: Forecast
    step_seconds: float
    samples_per_second: float
    peak_bytes: float
    resident_bytes: float
    from_step: int = 0
    health: tuple[Health, ...] = ()
    beside: tuple[Table, ...] = ()


Event = PlannedJob | Resumed | NothingLeft | Warned | Progress | Evaluated | Saved | Ended
