"""What is to be trained, as the user gave it to `attach`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.runtime.profiling.probe import Loss

__all__ = ["TrainJob", "Watcher"]


class Watcher(Protocol):
    """Looks on while a loop takes its first steps."""

    def before_step(self, leaves_one: bool) -> None:
        """leaves_one: whether the step before is over now, in which another optimizer rested."""

    def after_step(self, loop: Any, is_complete: bool) -> "Watcher | None":
        """Who looks on from now on: itself, another, or nobody.

        Args:
            is_complete: every optimizer has stepped, and every rank is after the same step.
        """

    def loaded(self, loop: Any, saved_plan: Mapping[str, Any], name: str) -> "Watcher | None":
        """The same, after a checkpoint was loaded that was saved under this plan (as JSON; empty if nobody knows).

        Args:
            name: of the checkpoint, for the user.
        """

    def stop(self) -> None:
        """At once; nothing of it is left."""


@dataclass(frozen=True, eq=False)
class TrainJob:
    """loss, example: None where the user's own loop takes the loss. seed, first_step: of random numbers (see `attach`).
    scaler: the loop's GradScaler, if it has one. check_data: whether ranks must not train on the same data.
    broadcast_buffers: whether rank 0's buffers reach all ranks. watcher: of a loop whose plan, or its forecast, is to
    come. profile, topology: what the plan was made from, where that is known. check_finite: whether a gradient that is
    not finite ends the step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss | None = None
    example: Any = None
    seed: int = 0
    first_step: int = 0
    scaler: Any = None
    check_data: bool = True
    broadcast_buffers: bool = True
    watcher: Watcher | None = None
    profile: Profile | None = None
    topology: Topology | None = None
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.check_finite and self.scaler is not None and self.scaler.is_enabled():
            raise ValueError(
                "check_finite=True: a GradScaler meets gradients that are not finite and skips their step; give one of "
                "the two"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Those that ranks must give alike."""
        return {
            "check_data": self.check_data,
            "broadcast_buffers": self.broadcast_buffers,
            "check_finite": self.check_finite,
        }
