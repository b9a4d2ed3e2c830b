"""What a training run is told before it begins: how long to train, when to save and when to look around."""

from dataclasses import dataclass, field
from pathlib import Path

from armillary.session.decide import JobRequest
from armillary.session.folder import CHECKPOINTS

__all__ = ["GLANCE_BATCHES", "PROGRESS_STEPS", "WATCHED_STEP", "Settings", "glance_steps"]

PROGRESS_STEPS = 10
WATCHED_STEP = 5  # under a plan, or its last: late enough that all state is there and prefetch is under way
GLANCES = 10  # short evaluations during a run, of this many batches per rank
GLANCE_BATCHES = 2


def glance_steps(steps: int) -> int:
    """From one short evaluation to the next; one more follows the last step."""
    return max(PROGRESS_STEPS, steps // GLANCES)


@dataclass(frozen=True)
class Settings:
    """How long to train and what to keep.

    Args of note:
        folder: of this run; rank 0 must be able to write it.
        every_steps, every_seconds: between checkpoints, whichever comes first; 0 is never. One more ends the run.
        keep: so many checkpoints.
        asks_options: whether options of the workload were named: those of its optimizer then win over saved ones.
    """

    folder: Path
    steps: int
    seed: int = 0
    every_steps: int = 0
    every_seconds: float = 60.0
    keep: int = 2
    resume: bool = False
    request: JobRequest = field(default_factory=JobRequest)
    asks_options: bool = False

    def __post_init__(self) -> None:
        intervals = (self.every_steps, self.every_seconds)
        if self.steps < 1 or self.keep < 1 or min(intervals) < 0:
            raise ValueError(f"train: want steps >= 1, keep >= 1 and no negative interval, got {self}")

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS
