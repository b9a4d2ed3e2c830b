"""A user's own loop whose updates are one step late, driven by autograd and the optimizer instead of a list.

    for batch in batches:                                    # this worker's own
        loss(model(batch.inputs), batch.target).backward()   # .grad is now the mean gradient of the step before
        optimizer.step()                                     # applies it, with the learning rate of the step before
        scheduler.step()

It does what the interpreter does for a schedule of one stage whose every update is a step late. A backward is `REDUCE`
and `B`, `optimizer.step()` the `UPDATE` of the step before, and the groups are the same `Reducer`'s. The first step has
nothing to apply.

Note [Order]. A wait is always for what every rank launched in its last step, so nobody waits in a circle.

A GradScaler is refused: its scale would be another step's. So is a changed `.grad`, since the last gradients are
applied where there is no loop (a checkpoint, the end).

Source: Pipe-SGD (Li et al., 2018) with width two; delayed parameter update (ZeRO-Offload, Ren et al., 2021). Departure:
the learning rate is that of the gradient's step.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from armillary.models.gradient_hooks import after_hooks, refuse_step_inside, refuse_taken
from armillary.runtime.replica_checks import alike
from armillary.schedules.clipping import Clip, square_of_stage
from armillary.session.stage_setup import StageSetup, replicas_of
from armillary.session.workload import Batch
from armillary.stages.optimizer_step import Options, clipped, options_of, refuse_own_options, step_with
from armillary.stages.reducer import Means, Reducer
from armillary.stages.train_spec import StepLosses

__all__ = ["OwnLoop", "OwnLoopEngine", "unchanged"]


def unchanged(means: Means) -> Means:
    """What is done to gradients where nobody asked for anything; see `OwnLoop`."""
    return means


def _nothing() -> None:
    """What is done before and after a step."""


class OwnLoop:
    """Attached until its `hooks` are closed; what is under way then is lost. All workers take the same number of steps
    and settle and drain together.

    Args:
        reducer: of all parameters that are trained.
        optimizer: before its first step or with a loaded state.
        change: of the mean gradients before they are applied: clips them, say.
        after_step: called when a step of the loop is over. within: entered around the waits of a backward.
        before_step: called when a backward begins, and when the optimizer is about to step; it may refuse.

    Raises:
        ValueError: the optimizer steps a parameter that is in no group.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: Optimizer,
        change: Callable[[Means], Means] = unchanged,
        after_step: Callable[[], None] = _nothing,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        before_step: Callable[[], None] = _nothing,
    ) -> None:
        self._reducer, self._optimizer, self._change = reducer, optimizer, change
        self._before_step, self._after_step, self._within = before_step, after_step, within
        self._parameters = [parameter for unit in reducer.units for parameter in unit.parameters]
        self.steps, self.drains = 0, list[int]()
        self._is_open = self._is_shown = self._is_own_step = False
        self._coming: Callable[[], Means] | None = None  # waits for the mean gradients of the last step
        self._shown: list[tuple[Tensor, int]] = []  # gradients, with their version counter
        self._options: Options | None = None  # of the step whose gradients are under way
        self._given: list[dict[str, Any]] = []  # the groups that the optimizer steps with
        self._now: list[dict[str, Any]] = []  # the user's groups while an older step's options are in them
        self._refuse_strangers(lambda parameter: parameter.requires_grad)
        self.hooks = ExitStack()
        self.hooks.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
        self.hooks.callback(optimizer.register_step_post_hook(lambda *_: self._step_ends()).remove)
        self._names = [name for unit in reducer.units for name in unit.bucket.layout.names]
        for number, one in enumerate(self._parameters):
            if one.requires_grad:
                arrived = partial(OwnLoop._arrived, number=number)
                self.hooks.callback(after_hooks(one, self, arrived, self._names[number]))

    def settle(self) -> None:
        """Waits until what is under way has arrived; training goes on unchanged."""
        self._refuse_inside("settle")
        if self._coming is not None:
            means = self._coming()
            self._coming = lambda: means

    def drain(self) -> None:
        """Settles, applies the last gradients, and lets the next step start as the first did."""
        self.settle()
        self._apply_last()
        self._coming = self._options = None
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

    def _apply_last(self) -> None:
        """Steps with the gradients that have arrived last, which stay as they are."""
        if self._options is None or self._coming is None:
            return
        self._is_own_step = True
        try:
            step_with(self._optimizer, self._change(self._coming()), self._options)
        finally:
            self._is_own_step = False

    def _arrived(self, _: Tensor, number: int) -> None:
        parameter = self._parameters[number]
        gradient = refuse_taken(self._reducer.place.rank, self._names[number], parameter)
        self._open(parameter)
        parameter.grad = None
        with self._within():
            self._reducer.put(self.steps, parameter, gradient.to_dense())

    def _open(self, first: nn.Parameter | None) -> None:
        """The first gradient of a backward is there."""
        if self._is_open:
            return
        if self._is_shown:
            raise RuntimeError(
                "own loop: a second backward before optimizer.step(); under this schedule a worker has one micro-batch "
                "a step. Join them, or use more workers"
            )
        full = [tuple(p.shape) for p in self._parameters if p.grad is not None and p is not first]
        if full:
            raise RuntimeError(
                f"own loop: {len(full)} parameters of shapes {full[:3]} had gradients before backward; want none: "
                f"leave them to the loop"
            )
        try:
            self._before_step()
        except BaseException:  # nothing has begun, so nothing of this backward may stay
            self._optimizer.zero_grad()
            if first is not None:
                first.grad = None
            raise
        self._is_open = True
        self._reducer.release(self.steps)
        if torch._C._current_graph_task_id() != -1:
            Variable._execution_engine.queue_callback(self._close)

    def _close(self) -> None:
        """The end of backward: what is left is launched, what has arrived is shown."""
        with self._within():
            self._reducer.close(self.steps)
            means = {} if self._coming is None else self._change(self._coming())
        step = self.steps
        self._coming = lambda: self._reducer.mean(step)
        for parameter in self._parameters:
            parameter.grad = means.get(parameter)
        self._shown = [(gradient, gradient._version) for gradient in means.values()]
        self._is_open, self._is_shown = False, True

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_own_step:
            return
        refuse_step_inside(self._reducer.place.rank)
        if any(value is not None for value in [*args[1:], kwargs.get("closure")]):
            raise RuntimeError("own loop: optimizer.step(closure); call backward before, and step without")
        if self._is_open:
            raise RuntimeError("own loop: a backward ended in an error; start again from a checkpoint")
        self._refuse_strangers(lambda parameter: parameter.grad is not None)
        self._before_step()
        if not self._is_shown:  # this rank's backward touched nothing
            self._open(None)
            self._close()
        self._refuse_change()
        mine, self._now = options_of(optimizer), [dict(group) for group in optimizer.param_groups]
        for group, then in zip(optimizer.param_groups, self._options or []):
            group.update(then)
        self._options, self._given = mine, [dict(group) for group in optimizer.param_groups]

    def _step_ends(self) -> None:
        if self._is_own_step:
            return
        refuse_own_options(self._optimizer, self._given)
        for group, now in zip(self._optimizer.param_groups, self._now, strict=True):
            group.update(now)
        for parameter in self._parameters:
            parameter.grad = None
        self._now, self._shown, self._is_shown = [], [], False
        self.steps += 1
        self._after_step()

    def _refuse_change(self) -> None:
        now = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        shown = {id(gradient): version for gradient, version in self._shown}
        if len(now) != len(shown) or any(shown.get(id(gradient)) != gradient._version for gradient in now):
            raise RuntimeError(
                "own loop: gradients were changed between backward and optimizer.step() (by clipping?). They are those "
                "of the step before, and the last ones are applied where no loop could change them (a checkpoint, the "
                "end). Leave them, and clip by the plan: its schedule's clip_norm"
            )

    def _refuse_inside(self, what: str) -> None:
        if self._is_open or self._is_shown:
            raise RuntimeError(f"own loop: {what} between backward and optimizer.step(); call it between two steps")

    def _refuse_strangers(self, counts: Callable[[Tensor], bool]) -> None:
        known = {id(parameter) for parameter in self._parameters}
        everything = [p for group in self._optimizer.param_groups for p in group["params"]]
        strange = [tuple(p.shape) for p in everything if id(p) not in known and counts(p)]
        if strange:
            raise ValueError(
                f"own loop: the optimizer steps {len(strange)} parameters of no group, of shapes {strange[:3]}: "
                f"workers would drift apart. Put every trained parameter into a group"
            )


class OwnLoopEngine:
    teller, lent_bytes = None, 0.0

    def __init__(self, parts: StageSetup, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        """before_step, after_step: called when a step of the loop begins, and when it is over."""
        clip, within = parts.options.clip, partial(parts.transport.within, "backward")
        change = unchanged if clip is None else partial(_clipped, clip, list(parts.job.model.parameters()))
        replicas = replicas_of(parts)
        self.units = [unit for units in replicas.groups.values() for unit in units]
        reducer = replicas.reducer(0, is_late=True)
        self.runtime = OwnLoop(reducer, parts.job.optimizer, change, after_step, within, before_step)
        self.newest, self.hooks = self.runtime.newest, self.runtime.hooks

    def given(self, batches: Sequence[Batch]) -> NoReturn:
        raise ValueError(
            "run.step: nobody said what the loss is; give loss=loss(model, batch) and example=batch to attach, or keep "
            "a loop of your own: backward, optimizer.step()"
        )

    step = given

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def alike(self) -> Mapping[str, Tensor]:
        return dict(alike(self.units))

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []


def _clipped(clip: Clip, parameters: Sequence[nn.Parameter], means: Means) -> Means:
    """By the norm over all parameters, in the model's order, which is one process's."""
    return clipped(means, square_of_stage(means[one] for one in parameters if one in means), clip)
