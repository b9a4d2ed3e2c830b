"""What is to be trained, as the user gave it to `attach`."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.runtime.watch.probe import Loss

__all__ = ["TrainJob"]


@dataclass(frozen=True, eq=False)
class TrainJob:
    """loss, example: None where the user's own loop takes the loss. seed, first_step: of random numbers (see `attach`).
    scaler: the loop's GradScaler, if it has one. check_data: whether ranks must not train on the same data.
    broadcast_buffers: whether rank 0's buffers reach all ranks."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss | None = None
    example: Any = None
    seed: int = 0
    first_step: int = 0
    scaler: Any = None
    check_data: bool = True
    broadcast_buffers: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Those that ranks must give alike."""
        return {"check_data": self.check_data, "broadcast_buffers": self.broadcast_buffers}
