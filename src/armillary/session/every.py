"""When the next checkpoint is due: every so many steps or seconds, by rank 0's clock.

Clocks of workers differ, and a rank that saves alone waits for ever; so rank 0's decides and the others are told.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

from armillary.session.job import Job

__all__ = ["CheckpointEvery"]


class CheckpointedRun(Protocol):
    """Whose checkpoints they are."""

    @property
    def _engine(self) -> Job: ...


@dataclass(eq=False)
class CheckpointEvery:
    """Begins when it is made. steps, seconds: whichever comes first; 0 is never."""

    steps: int = 0
    seconds: float = 0.0
    last_seconds: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.seconds < 0:
            raise ValueError(f"every: want no negative interval, got {self.steps} steps, {self.seconds} seconds")

    def is_due(self, step: int, now_seconds: float) -> bool:
        """Whether `step` ends an interval, or the last one to be due was too long ago. Asks nobody."""
        by_step = self.steps > 0 and step > 0 and step % self.steps == 0
        return by_step or 0 < self.seconds <= now_seconds - self.last_seconds

    def due(self, run: CheckpointedRun, step: int) -> bool:
        """Collective where seconds count (one number per call): the same answer on every rank, after `step` steps."""
        now = time.monotonic()
        is_due = self.is_due(step, now)
        if self.seconds > 0:
            job = run._engine
            with job.transport.within("CheckpointEvery.due"), job.transport.unrecorded():
                job.serve()
                is_due = bool(job.transport.agree_largest([float(is_due and job.rank == 0)])[0])
        if is_due:
            self.last_seconds = now
        return is_due
