"""Data parallelism one step late: a step begins while the gradients of the last one are being reduced.

The rule of cyclic data parallelism with slack >= N, by a collective instead of a ring: its honest rival. The model is
not cut, so every model and every loss will do.

Source: Pipe-SGD (Li et al., 2018) with width two; delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from dataclasses import dataclass
from typing import Any

from armillary.facts.plan import Choice
from armillary.schedules.action import one_pass
from armillary.schedules.clipping import Clip
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["BY", "DelayedOptions", "delayed_all_reduce"]

BY = Choice("all_reduce")  # the exchange that the schedule is named after


@register({"workers": 2, "stages": 2})
def delayed_all_reduce(workers: int, stages: int = 1) -> Schedule:
    """All workers at the same tick, all weights one step old."""
    rows = tuple(one_pass(worker, stages, start=0) for worker in range(workers))
    return Schedule("delayed_all_reduce", 2 * stages, rows, ((1,) * stages,) * workers)


@dataclass(frozen=True)
class DelayedOptions:
    """
    Args of note:
        clip_norm: that a step's mean gradient keeps at most, exactly as one process clips; None: it is not clipped.
        bucket_bytes: of gradients that travel together; 0: the planner's default.

    Raises:
        ValueError: no worker, a norm that is not positive, or a negative bucket.
    """

    micro_batches: int  # one a worker
    clip_norm: float | None = None
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.bucket_bytes < 0:
            raise ValueError(
                f"schedule: delayed_all_reduce wants 1 worker or more and bucket_bytes >= 0, got {self.micro_batches} "
                f"and {self.bucket_bytes}"
            )
        _ = self.clip  # refuses what is no norm

    @property
    def clip(self) -> Clip | None:
        return None if self.clip_norm is None else Clip(self.clip_norm)

    @property
    def mode(self) -> str:
        """What a table calls it, where cyclic schedules have a mode."""
        return "delayed_all_reduce"

    def schedule(self) -> Schedule:
        return delayed_all_reduce(self.micro_batches)

    def picture(self) -> str:
        """Who does what when."""
        return str(self.schedule())

    def as_options(self) -> dict[str, Any]:
        """What a plan writes down."""
        said = {"clip_norm": self.clip_norm, "bucket_bytes": self.bucket_bytes}
        return {name: value for name, value in said.items() if value}
