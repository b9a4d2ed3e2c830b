"""The user's plain loop as one worker of a staggered schedule: hooks on the model tell where the worker is.

A stage is entered with its first module; its gradients leave when the last of them is there, or when backward goes on
to an earlier stage. `optimizer.step()` closes the worker's step and notes its learning rate; the optimizer moves home
stages only, later. Gradients in `.grad` are this worker's own: the sum does not exist yet when `backward` returns.
Changing them (clipping) is refused, not ignored. Forwards in eval mode or without gradients are left alone.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.delayed_step import Options, options_of
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.cyclic.home import Home
from armillary.runtime.when_final import when_final
from armillary.schedules.random_stream import place_seed, seed_streams

__all__ = ["Part", "WorkerLoop"]


class Part(Protocol):
    """One worker's part of a schedule, which is told where its worker is.

    Per step: `before(action)` before each of the 2K actions (forwards 0..K-1, then backwards K-1..0), `add` after each
    backward, `end_step` at the end. Every worker makes the same calls.
    """

    worker: int
    steps: int
    flat: dict[int, FlatStage]

    @property
    def home(self) -> Home: ...

    def before(self, action: int) -> None: ...

    def add(self, stage: int, gradients: Sequence[Tensor | None]) -> None: ...

    def end_step(self, options: Options) -> None: ...


class WorkerLoop:
    """Attached from construction to `detach`.

    Args:
        stages: a cut of `model`; its modules and parameters are the model's own.
        optimizer: the one whose parameters the part's home has taken over.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage], optimizer: Optimizer, part: Part, seed: int) -> None:
        self.part = part
        self._model, self._optimizer, self._seed = model, optimizer, seed
        self._count = len(stages)
        self._entered = self._count  # stages of this forward that were entered; all of them while none is running
        self._next_back = -1  # the stage whose backward comes next; none outside forward and backward
        self._missing: dict[int, int] = {}
        self._sent: list[tuple[nn.Parameter, Tensor, int]] = []  # with the gradient's version counter at the sending
        self._is_open = False  # from a training forward to optimizer.step()
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
        for index, flat in self.part.flat.items():
            for parameter in flat.parameters:
                yield when_final(parameter, self, partial(WorkerLoop._gradient_is_there, stage=index))

    def detach(self) -> None:
        """Takes the hooks off; the optimizer keeps stepping home stages only."""
        for hook in self._hooks:
            hook.remove()

    def reach(self, stage: int) -> None:
        """Inside backward: it has come to this stage; those after it are over, whatever parameters it did not use."""
        self._backward_begins()
        while self._next_back > stage:
            self._add_next()

    def refuse_inside(self, what: str) -> None:
        """
        Raises:
            RuntimeError: a step is under way.
        """
        if self._is_open:
            raise RuntimeError(f"ring: {what} between forward and optimizer.step(); call it between two steps")

    def _begin(self) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if self._is_open:
            raise RuntimeError(
                "ring: a second training forward before optimizer.step(); a worker has one micro-batch a step. Join "
                "them, use more workers, or look ahead under torch.no_grad()"
            )
        full = [p for flat in self.part.flat.values() for p in flat.parameters if p.grad is not None]
        if full:
            raise RuntimeError(f"ring: {len(full)} parameters have gradients before the forward; want none")
        self._entered, self._next_back, self._is_open = 0, self._count - 1, True
        self._missing = {index: len(flat.parameters) for index, flat in self.part.flat.items()}
        self._random = [torch.get_rng_state(), _accelerator_states()]

    def _enter(self, stage: int) -> None:
        while self._entered <= stage and self._entered < self._count:
            self.part.before(self._entered)
            place = (self.part.steps, self.part.worker, self._entered)
            seed_streams(place_seed(self._seed, place), self.part.flat[self._entered].device)
            self._entered += 1

    def _forward_ends(self) -> None:
        if not self._random:
            return
        self._enter(self._count - 1)
        torch.set_rng_state(self._random[0])
        for device, state in self._random[1]:
            torch.cuda.set_rng_state(state, device)
        self._random = []
        self.part.before(self._count)

    def _gradient_is_there(self, _: Tensor, stage: int) -> None:
        if self._next_back < 0:
            raise RuntimeError(
                "ring: a backward without a training forward before it, or a second one; want one a step"
            )
        if stage > self._next_back:
            raise RuntimeError(
                f"ring: worker {self.part.worker}: a gradient of stage {stage} appeared after backward had gone on to "
                f"stage {self._next_back}; its sum has left. Cut the model where one stage ends before the next begins"
            )
        self._backward_begins()
        self._missing[stage] -= 1
        while self._next_back >= 0 and not self._missing[self._next_back]:
            self._add_next()

    def _backward_begins(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        """Stages with parameters that this worker did not use are only known to be complete now."""
        while self._next_back >= 0:
            self._add_next()
        self._in_backward = False

    def _add_next(self) -> None:
        stage = self._next_back
        parameters = self.part.flat[stage].parameters
        self.part.add(stage, [parameter.grad for parameter in parameters])
        self._sent += [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        self._next_back -= 1
        if self._next_back >= 0:
            self.part.before(2 * self._count - 1 - self._next_back)

    def _step_ends(self) -> None:
        if self.part.home.stepping:
            return
        if hasattr(self._optimizer, "grad_scale"):
            raise RuntimeError(
                "ring: the loss was scaled by a GradScaler; homes step their stages at different times, before anybody "
                "knows whether all gradients of the step are finite. Use bfloat16, which needs no scaling, or "
                "GradScaler(enabled=False)"
            )
        if self._next_back >= 0 or not self._is_open:
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
        self._sent, self._is_open = [], False
        self.part.end_step(options_of(self._optimizer))


def _accelerator_states() -> list[tuple[int, Tensor]]:
    if not torch.cuda.is_initialized():
        return []
    return [(device, torch.cuda.get_rng_state(device)) for device in range(torch.cuda.device_count())]
