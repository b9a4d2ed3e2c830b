"""The truth of an exact schedule: `loss(model, batch)` of the user's own model, one micro-batch after the other.

It knows no stage: nothing of it can share a fault with what cuts a model. Running statistics are kept by replica, since
replicas that have data of their own do not tell each other theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.reference.clipped import clip_gradients
from armillary.schedules.clipping import Clip

__all__ = ["WholeModel"]

Loss = Callable[[nn.Module, Any], Tensor]
Sums = dict[nn.Parameter, Tensor]


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

    def step(self, batches: Sequence[Sequence[Any]]) -> list[Tensor]:
        """One training step; returns the losses. batches: [replica][micro-batch].

        A replica's gradients are added up in the order of its micro-batches and divided by their number, then the mean
        over replicas is taken, in their order.
        """
        losses, means = list[Tensor](), Sums()
        for replica, mine in enumerate(batches):
            own = Sums()
            for batch in mine:
                losses.append(self._add_gradients(own, replica, batch))
            for parameter, total in own.items():
                _add(means, parameter, total / len(mine))
        for parameter, total in means.items():
            parameter.grad = total / len(batches)
        if self._clip is not None:
            clip_gradients(self._stages, self._clip, self._step, self._squares, self._drains)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._put(self.buffers[0])
        self._step += 1
        return losses

    def _add_gradients(self, sums: Sums, replica: int, batch: Any) -> Tensor:
        """Those of one micro-batch, with the replica's running statistics; returns its loss."""
        self._put(self.buffers[replica])
        value = self._loss(self._model, batch)
        value.backward()
        self.buffers[replica] = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                _add(sums, parameter, parameter.grad.to_dense())
        self._model.zero_grad(set_to_none=True)
        return value.detach()

    def _put(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])


def _add(sums: Sums, parameter: nn.Parameter, gradient: Tensor) -> None:
    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
