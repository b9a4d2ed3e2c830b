"""The user's plain loop as one worker of a ring that keeps no weights: `worker_loop.py` tells the ring where it is.

A parameter holds its weights only while its stage runs; between two steps, and for a stage out of turn, reading it is
refused (look at the model inside `newest`). Gradients leave with backward: `.grad` is None when it returns, so there is
nothing to clip; the ring clips itself (`Course.clip`). Recomputation (torch's checkpoint) is allowed within a stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from armillary.runtime.channel import Channel
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.worker_loop import WorkerLoop
from armillary.runtime.cyclic.zero_ring import ZeroRing
from armillary.schedules.messages import home

__all__ = ["ZeroLoop"]


class ZeroLoop:
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
        self.ring = ZeroRing(stages, optimizer, course, channel, worker, lambda stage: self._loop.reach(stage))
        self._loop = WorkerLoop(model, stages, optimizer, self.ring, course.seed)
        self._graphs: list[saved_tensors_hooks] = []  # that of the forward under way
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(lambda module, given: self._forward_begins()),
            *self._watch_readers(model),
            model.register_forward_hook(lambda *_: self._forward_ends(), always_call=True),
        ]

    def _watch_readers(self, model: nn.Module) -> Iterator[Any]:
        owner = {id(p): stage for stage, flat in self.ring.flat.items() for p in flat.parameters}
        for path, module in model.named_modules():
            for stage in sorted({owner[id(p)] for p in module.parameters(recurse=False) if id(p) in owner}):
                yield module.register_forward_pre_hook(lambda _, given, where=(path, stage): self._refuse_blank(*where))

    def settle(self) -> None:
        """Every home makes its newest version; training goes on unchanged."""
        self._loop.refuse_inside("settle")
        self.ring.settle()

    def drain(self) -> None:
        """Settles, and lets the next step start as the first did: it reads the newest weights."""
        self._loop.refuse_inside("drain")
        self.ring.drain()

    @contextmanager
    def newest(self, spread: Callable[[Tensor, int], None]) -> Iterator[None]:
        """Settles; inside, the model holds the newest version of every stage, whole, on every worker.

        Args:
            spread: collective; overwrites a tensor with that of a worker, the stage's home.
        """
        self.settle()
        whole = {}
        for stage, flat in self.ring.flat.items():
            owner = home(self.ring.schedule, stage)
            whole[stage] = self.ring.home.copy(stage) if owner == self.ring.worker else flat.empty_weights()
            for part in whole[stage]:
                spread(part, owner)
        with self.ring.loan.look(whole):
            yield

    def detach(self) -> None:
        """Takes the hooks off; the optimizer keeps stepping home stages only."""
        self._loop.detach()
        for hook in self._hooks:
            hook.remove()

    def _forward_begins(self) -> None:
        self._forward_ends()
        self._graphs = [saved_tensors_hooks(self.ring.loan.note, self.ring.loan.look_up)]
        self._graphs[0].__enter__()

    def _forward_ends(self) -> None:
        for graph in self._graphs:
            graph.__exit__()
        self._graphs = []

    def _refuse_blank(self, path: str, stage: int) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpointed part runs again, inside backward
            self._loop.reach(stage)
        if not self.ring.loan.has(stage):
            raise RuntimeError(
                f"stages: worker {self.ring.worker}: {path or 'the model'} reads weights of stage {stage}, which "
                f"are not here: a worker holds one stage at a time. Evaluate inside newest(); in training, let "
                f"every module be called in its own stage only, or take ring"
            )
