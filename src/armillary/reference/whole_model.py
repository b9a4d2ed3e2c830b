"""The truth of an exact schedule: `loss(model, batch)` of the user's own model, one micro-batch after the other.

It knows no stage: nothing of it can share a fault with what cuts a model. Running statistics are kept by replica, since
replicas that have data of their own do not tell each other theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.reference.clipped import clip_gradients
from armillary.reference.serial import train_step
from armillary.schedules.clipping import Clip

__all__ = ["WholeModel"]

Loss = Callable[[nn.Module, Any], Tensor]


class _Given(NamedTuple):
    """A micro-batch, and the replica that it was handed to."""

    replica: int
    batch: Any


class WholeModel:
    """
    Args:
        model: it is trained in place. stages: its parameters by stage, by whose norms a schedule may clip.
        clip: of the mean gradient of every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        replicas: int = 1,
        stages: Sequence[Sequence[nn.Parameter]] = (),
        clip: Clip | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss, self._clip = model, optimizer, loss, clip
        self._stages = [nn.ParameterList(one) for one in stages]
        self._step, self._squares, self._drains = 0, dict[int, Tensor](), list[int]()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.buffers = [start | {} for _ in range(replicas)]

    def drain(self) -> None:
        """Everything before the next step has finished; it always has."""
        self._drains.append(self._step)

    def step(self, batches: Sequence[Sequence[Any]]) -> list[float]:
        """One training step; returns the losses. batches: [replica][micro-batch]."""
        given = [_Given(replica, batch) for replica, mine in enumerate(batches) for batch in mine]
        losses = train_step(self._model, self._optimizer, given, self._own_loss, before_step=self._clipped)
        self._optimizer.zero_grad(set_to_none=True)
        self._put(self.buffers[0])
        self._step += 1
        return losses

    def _own_loss(self, model: nn.Module, given: _Given) -> Tensor:
        """With the replica's running statistics."""
        self._put(self.buffers[given.replica])
        value = self._loss(model, given.batch)
        self.buffers[given.replica] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return value

    def _put(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])

    def _clipped(self, model: nn.Module) -> None:
        if self._clip is not None:
            clip_gradients(self._stages, self._clip, self._step, self._squares, self._drains)
