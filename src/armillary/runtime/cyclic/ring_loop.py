"""The user's plain loop as one worker of a ring: hooks on the model tell the ring where the worker is.

    for batch in batches:                       # this worker's own
        loss(model(batch.inputs), batch.target).backward()
        optimizer.step()
        scheduler.step()

A stage's weights arrive when the forward enters its first module; its gradients leave when the last of them is there.
`optimizer.step()` closes the worker's step and notes its learning rate; the optimizer moves home stages only, later.
Gradients in `.grad` are this worker's own: the sum does not exist yet when `backward` returns. Changing them (clipping)
is refused, not ignored; the ring clips itself (`Course.clip`). Forwards in eval mode or without gradients are left
alone and read what the worker has.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.channel import Channel
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.ring import Ring
from armillary.runtime.cyclic.worker_loop import WorkerLoop

__all__ = ["RingLoop"]


class RingLoop:
    """Attached from construction to `detach`. All workers take the same number of steps and settle and drain together.

    Args:
        stages: a cut of `model`; its modules and parameters are the model's own.
        optimizer: over the model's parameters, before its first step or with a loaded state.
        worker: this process's number, which is its micro-batch and its rank on the channel.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        optimizer: Optimizer,
        course: Course,
        channel: Channel,
        worker: int,
    ) -> None:
        self.ring = Ring(stages, optimizer, course, channel, worker)
        self._loop = WorkerLoop(model, stages, optimizer, self.ring, course.seed)

    def settle(self) -> None:
        """Waits until this worker has the newest version of every stage; training goes on unchanged."""
        self._loop.refuse_inside("settle")
        self.ring.settle()

    def drain(self) -> None:
        """Settles, and lets the next step start as the first did: the model holds and reads the newest weights."""
        self._loop.refuse_inside("drain")
        self.ring.drain()

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Settles; inside, the model holds the newest version of every stage (to evaluate), then its own again."""
        self.settle()
        flats = self.ring.flat.values()
        kept = [[parameter.detach().clone() for parameter in flat.parameters] for flat in flats]
        self._put([self.ring.newest_weights(stage) for stage in self.ring.flat])
        try:
            yield
        finally:
            self._put(kept)

    def detach(self) -> None:
        """Takes the hooks off; the optimizer keeps stepping home stages only."""
        self._loop.detach()

    def _put(self, weights: Sequence[Sequence[Tensor]]) -> None:
        with torch.no_grad():
            for flat, new in zip(self.ring.flat.values(), weights, strict=True):
                for parameter, weight in zip(flat.parameters, new):
                    parameter.copy_(weight)
        torch.clear_autocast_cache()
