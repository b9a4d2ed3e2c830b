"""Data parallelism one step late in the user's plain loop: gradients are all-reduced while the next step computes.

    for batch in batches:                                    # this worker's own
        loss(model(batch.inputs), batch.target).backward()   # .grad is now the mean gradient of the step before
        clip_grad_norm_(model.parameters(), 1.0)             # so this is exact
        optimizer.step()                                     # applies it, with the learning rate of the step before
        scheduler.step()

A bucket is under way from the moment its gradients are there until the same moment of the next step. The first step has
nothing to apply. Two flat tensors a bucket are all it takes: weights are read at one age only, so there is one version.

Note [Order]. Buckets leave in the order given, whatever order their gradients appear in; what got no gradient leaves at
the end of backward, as unused. A wait is always for what every rank launched in its last step, so nobody waits in a
circle.

Gradients are divided by the number of workers before they are summed, as DDP does: with one or two workers that is bit
for bit the reference's sum divided (halving rounds nothing); with more, gloo's order of summing is not the workers'.
No GradScaler: its scale would be another step's.

Source: Pipe-SGD (Li et al., 2018) with width two; delayed parameter update (ZeRO-Offload, Ren et al., 2021). Departure:
the rate is that of the gradient's step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from armillary.runtime.channel import Requests
from armillary.runtime.cyclic.delayed_step import Options, options_of, step_with
from armillary.runtime.cyclic.twin_bucket import TwinBucket
from armillary.runtime.hybrid.bucket import Bucket
from armillary.runtime.when_final import when_final

__all__ = ["DelayedAllReduce"]


def _nothing() -> None:
    """What is done before a step where nobody asked for anything."""


class DelayedAllReduce:
    """Attached from construction to `detach`. All workers take the same number of steps and settle and drain together.

    Args:
        buckets: name -> parameters that travel together, each of one dtype and device; in launch order.
        optimizer: over parameters of the buckets, before its first step or with a loaded state.
        before_step: clips `.grad`, say; called before every step, in a drain, too. A loop may clip by itself, but then
            it cannot drain.

    Raises:
        ValueError: the optimizer steps a parameter that is in no bucket.
    """

    def __init__(
        self,
        buckets: Mapping[str, Sequence[nn.Parameter]],
        optimizer: Optimizer,
        requests: Requests,
        workers: int,
        before_step: Callable[[], object] = _nothing,
    ) -> None:
        self._units = [TwinBucket(name, Bucket(members), Bucket(members)) for name, members in buckets.items()]
        self._parameters = [parameter for unit in self._units for parameter in unit.free.parameters]
        self._optimizer, self._requests, self._before_step = optimizer, requests, before_step
        self._scale = 1.0 / workers
        self.steps, self.drains = 0, list[int]()
        self._launched = 0  # units of this backward
        self._is_open = self._is_shown = False  # inside a backward; between its end and the optimizer's step
        self._is_own_step = self._was_changed = False
        self._shown: list[tuple[Tensor, int]] = []  # gradients, with their version counter
        self._options: Options | None = None  # of the step whose gradients are under way
        self._now: list[dict[str, Any]] = []  # the user's groups while an older step's options are in them
        self._refuse_strangers(lambda parameter: parameter.requires_grad)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self._step_ends()),
        ]
        for place, unit in enumerate(self._units):
            for index, parameter in enumerate(unit.free.parameters):
                told = partial(DelayedAllReduce._arrived, place=place, index=index)
                self._hooks.append(when_final(parameter, self, told))

    @property
    def flat_tensors(self) -> list[Tensor]:
        """What is held besides weights and optimizer state: two gradients of everything."""
        return [bucket.flat for unit in self._units for bucket in (unit.free, unit.sent)]

    def settle(self) -> None:
        """Waits until what is under way has arrived; training goes on unchanged."""
        self._refuse_inside("settle")
        for unit in self._units:
            unit.settle()

    def drain(self) -> None:
        """Settles, applies the last gradients, and lets the next step start as the first did."""
        self.settle()
        self._apply_last()
        for unit in self._units:
            unit.forget()
        self._options = None
        self.drains.append(self.steps)

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Settles; inside, the model holds the newest weights (to evaluate), then those it trains with again.

        Inside, memory holds weights and optimizer state twice.
        """
        self.settle()
        kept = [parameter.detach().clone() for parameter in self._parameters]
        state = {parameter: copy.deepcopy(entries) for parameter, entries in self._optimizer.state.items()}
        self._apply_last()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(self._parameters, kept, strict=True):
                    parameter.copy_(weight)
            self._optimizer.state.clear()
            self._optimizer.state.update(state)

    def detach(self) -> None:
        """Takes the hooks off; what is under way is lost unless drained before."""
        for hook in self._hooks:
            hook.remove()

    def _apply_last(self) -> None:
        """Steps with the gradients that have arrived last, which stay as they are."""
        if self._options is None:
            return
        if self._was_changed:
            raise RuntimeError(
                "delayed all-reduce: the loop changed gradients before optimizer.step() (by clipping?), so the last "
                "ones cannot be applied without it; give the same change as before_step"
            )
        for unit in self._units:
            unit.show_last()
        for parameter in self._parameters:
            if parameter.grad is not None:  # a copy, for what the change below does to it must not last
                parameter.grad = parameter.grad.clone()
        self._is_own_step = True
        try:
            self._before_step()
            gradients = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
            self._forget_gradients()
            step_with(self._optimizer, gradients, self._options)
        finally:
            self._is_own_step = False

    def _arrived(self, parameter: Tensor, place: int, index: int) -> None:
        """The gradient of a parameter of the unit at that place."""
        assert isinstance(parameter, nn.Parameter)
        self._open(parameter)
        self._units[place].free.deposit(index, self._scale)
        while self._launched < len(self._units) and self._units[self._launched].free.is_ready:
            self._launch()

    def _open(self, first: nn.Parameter | None) -> None:
        """The first gradient of a backward is there."""
        if self._is_open:
            return
        if self._is_shown:
            raise RuntimeError(
                "delayed all-reduce: a second backward before optimizer.step(); a worker has one micro-batch a step. "
                "Join them, or use more workers"
            )
        full = [tuple(p.shape) for p in self._parameters if p.grad is not None and p is not first]
        if full:
            raise RuntimeError(
                f"delayed all-reduce: {len(full)} parameters of shapes {full[:3]} had gradients before backward; want "
                f"none: leave them to the loop"
            )
        for unit in self._units:
            unit.free.reset()
        self._is_open, self._launched = True, 0
        if torch._C._current_graph_task_id() != -1:
            Variable._execution_engine.queue_callback(self._close)

    def _launch(self) -> None:
        with torch.no_grad():
            self._units[self._launched].launch(self._requests, self._scale)
        self._launched += 1

    def _close(self) -> None:
        """The end of backward: what is left is launched, what has arrived is shown."""
        while self._launched < len(self._units):
            self._launch()
        for unit in self._units:
            unit.show()
        self._shown = [(p.grad, p.grad._version) for p in self._parameters if p.grad is not None]
        self._is_open, self._is_shown = False, True

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_own_step:
            return
        if any(value is not None for value in [*args[1:], kwargs.get("closure")]):
            raise RuntimeError("delayed all-reduce: optimizer.step(closure); call backward before, and step without")
        if self._is_open:
            raise RuntimeError("delayed all-reduce: a backward ended in an error; start again from a checkpoint")
        self._refuse_strangers(lambda parameter: parameter.grad is not None)
        if not self._is_shown:  # this rank's backward touched nothing
            self._open(None)
            self._close()
        now = [p.grad for p in self._parameters if p.grad is not None]
        self._was_changed |= len(now) != len(self._shown) or any(
            gradient is not shown or gradient._version != version
            for gradient, (shown, version) in zip(now, self._shown)
        )
        self._before_step()
        mine, self._now = options_of(optimizer), [dict(group) for group in optimizer.param_groups]
        for group, then in zip(optimizer.param_groups, self._options or []):
            group.update(then)
        self._options = mine

    def _step_ends(self) -> None:
        if self._is_own_step:
            return
        for group, now in zip(self._optimizer.param_groups, self._now, strict=True):
            group.update(now)
        self._forget_gradients()
        self._now, self._shown, self._is_shown = [], [], False
        self.steps += 1

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _refuse_inside(self, what: str) -> None:
        if self._is_open or self._is_shown:
            raise RuntimeError(
                f"delayed all-reduce: {what} between backward and optimizer.step(); call it between two steps"
            )

    def _refuse_strangers(self, counts: Callable[[Tensor], bool]) -> None:
        known = {id(parameter) for parameter in self._parameters}
        everything = [p for group in self._optimizer.param_groups for p in group["params"]]
        strange = [tuple(p.shape) for p in everything if id(p) not in known and counts(p)]
        if strange:
            raise ValueError(
                f"delayed all-reduce: the optimizer steps {len(strange)} parameters of no bucket, of shapes "
                f"{strange[:3]}: workers would drift apart. Put every trained parameter into a bucket"
            )
