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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from armillary.runtime.channel import Channel
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import options_of
from armillary.runtime.cyclic.ring import Ring
from armillary.schedules.random_stream import place_seed, seed_streams

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
        self._model, self._optimizer, self._seed = model, optimizer, course.seed
        self._count = len(stages)
        self._entered = self._count  # stages of this forward that were entered; all of them while none is running
        self._next_back = -1  # the stage whose backward comes next; none outside forward and backward
        self._missing: dict[int, int] = {}
        self._sent: list[tuple[nn.Parameter, Tensor, int]] = []  # with the gradient's version counter at the sending
        self._in_backward = False
        self._random: list[Any] = []
        # torch then leaves scaled gradients to the optimizer's step, where they are refused by name
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(lambda module, given: self._begin()),
            *self._watch_stages(stages),
            model.register_forward_hook(lambda module, given, result: self._forward_ends()),
            optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._step_ends()),
        ]

    def _watch_stages(self, stages: Sequence[Stage]) -> Iterator[Any]:
        owner = {id(p): stage.index for stage in stages for p in stage.module.parameters()}
        inside = {id(module): stage.index for stage in reversed(stages) for module in stage.module.modules()}
        for module in self._model.modules():
            owned = [owner[id(p)] for p in module.parameters(recurse=False) if id(p) in owner]
            stage = min(owned, default=inside.get(id(module)))
            if stage is not None:
                yield module.register_forward_pre_hook(lambda module, given, stage=stage: self._enter(stage))
        for index, flat in self.ring.flat.items():
            for parameter in flat.parameters:
                yield parameter.register_post_accumulate_grad_hook(
                    lambda p, index=index: self._gradient_is_there(index)
                )

    def settle(self) -> None:
        """Waits until this worker has the newest version of every stage; training goes on unchanged."""
        self._refuse_inside("settle")
        self.ring.settle()

    def drain(self) -> None:
        """Settles, and lets the next step start as the first did: the model holds and reads the newest weights."""
        self._refuse_inside("drain")
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
        for hook in self._hooks:
            hook.remove()

    def _put(self, weights: Sequence[Sequence[Tensor]]) -> None:
        with torch.no_grad():
            for flat, new in zip(self.ring.flat.values(), weights, strict=True):
                for parameter, weight in zip(flat.parameters, new):
                    parameter.copy_(weight)
        torch.clear_autocast_cache()

    def _refuse_inside(self, what: str) -> None:
        if self._next_back >= 0 or self._sent:
            raise RuntimeError(f"ring: {what} between forward and optimizer.step(); call it between two steps")

    def _begin(self) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if self._next_back >= 0 or self._sent:
            raise RuntimeError(
                "ring: a second training forward before optimizer.step(); a worker has one micro-batch a step. Join "
                "them, use more workers, or look ahead under torch.no_grad()"
            )
        full = [p for flat in self.ring.flat.values() for p in flat.parameters if p.grad is not None]
        if full:
            raise RuntimeError(f"ring: {len(full)} parameters have gradients before the forward; want none")
        self._entered, self._next_back = 0, self._count - 1
        self._missing = {index: len(flat.parameters) for index, flat in self.ring.flat.items()}
        self._random = [torch.get_rng_state(), _accelerator_states()]

    def _enter(self, stage: int) -> None:
        while self._entered <= stage and self._entered < self._count:
            self.ring.before(self._entered)
            place = (self.ring.steps, self.ring.worker, self._entered)
            seed_streams(place_seed(self._seed, place), self.ring.flat[self._entered].device)
            self._entered += 1

    def _forward_ends(self) -> None:
        if not self._random:
            return
        self._enter(self._count - 1)
        torch.set_rng_state(self._random[0])
        for device, state in self._random[1]:
            torch.cuda.set_rng_state(state, device)
        self._random = []
        self.ring.before(self._count)

    def _gradient_is_there(self, stage: int) -> None:
        if self._next_back < 0:
            raise RuntimeError(
                "ring: a backward without a training forward before it, or a second one; want one a step"
            )
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ends)
        self._missing[stage] -= 1
        while self._next_back >= 0 and not self._missing[self._next_back]:
            self._add_next()

    def _backward_ends(self) -> None:
        """Stages with parameters that this worker did not use are only known to be complete now."""
        while self._next_back >= 0:
            self._add_next()
        self._in_backward = False

    def _add_next(self) -> None:
        stage = self._next_back
        parameters = self.ring.flat[stage].parameters
        self.ring.add(stage, [parameter.grad for parameter in parameters])
        self._sent += [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        self._next_back -= 1
        if self._next_back >= 0:
            self.ring.before(2 * self._count - 1 - self._next_back)

    def _step_ends(self) -> None:
        if self.ring.home.stepping:
            return
        if hasattr(self._optimizer, "grad_scale"):
            raise RuntimeError(
                "ring: the loss was scaled by a GradScaler; homes step their stages at different times, before anybody "
                "knows whether all gradients of the step are finite. Use bfloat16, which needs no scaling, or "
                "GradScaler(enabled=False)"
            )
        if self._next_back >= 0 or not self._sent:
            raise RuntimeError(
                "ring: optimizer.step() without a forward in training mode and a whole backward since the last one; "
                "the other workers would wait for this worker's gradients"
            )
        changed = [tuple(p.shape) for p, grad, version in self._sent if p.grad is not None and grad._version != version]
        changed += [tuple(p.shape) for p, grad, _ in self._sent if p.grad is not None and p.grad is not grad]
        if changed:
            raise RuntimeError(
                f"ring: {len(changed)} gradients (shapes {changed[:3]}) were changed after backward (by clipping?); "
                f"they had left, and no worker knows the norm of their sum yet. Drop clip_grad_norm_ and clip by the "
                f"schedule's options clip_norm and clip_by (--clip NORM --clip-by global|stage|previous)"
            )
        for parameter, _, _ in self._sent:
            parameter.grad = None
        self._sent = []
        self.ring.end_step(options_of(self._optimizer))


def _accelerator_states() -> list[tuple[int, Tensor]]:
    if not torch.cuda.is_initialized():
        return []
    return [(device, torch.cuda.get_rng_state(device)) for device in range(torch.cuda.device_count())]
