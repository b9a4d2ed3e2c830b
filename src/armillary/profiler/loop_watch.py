"""Watches the steps of a loop that it does not run: how every parameter is read, from forward to the end of backward.

The watch stays open over the user's own code (reads outside `model.forward` count), so it must tell what is part of a
step: operations under autograd, and those inside a backward. Evaluation without gradients, averages under `no_grad` and
the optimizer's step are not. Compiled parts of the model run uncompiled meanwhile (their kernels would hide reads), and
are compiled afterwards.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from armillary.models.gradient_hooks import on_grad_accumulated
from armillary.profiler.access_patterns import LATE, NO_LOOKUPS, Lookups, WatchReads, merged
from armillary.profiler.probe import UNSEEN, has_unseen_reader, rows_of

__all__ = ["LoopWatch", "SeenParameter", "SeenStep", "Told"]


@dataclass(frozen=True)
class SeenParameter:
    """How one parameter was read, as `Reading` has it."""

    gathers: tuple[str, ...]
    dense: tuple[str, ...]
    refusals: tuple[str, ...]
    is_rewritten: bool


@dataclass(frozen=True)
class SeenStep:
    """One step of the loop on this rank. Seconds include the watching."""

    lookups: Mapping[str, Lookups]
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class Told:
    """What one rank saw, for the others.

    Args of note:
        arrivals: names of parameters in the order in which their gradients became final.
        activation_bytes: of storages that forward made and that were still there when backward began; the most of the
            first step. The second is watched for its times.
    """

    seen: Mapping[str, SeenParameter]
    steps: Sequence[SeenStep]
    arrivals: tuple[str, ...]
    activation_bytes: int


class LoopWatch(TorchDispatchMode):
    """From `begin` to `end`; `take` closes a step. `is_paused`: while the optimizer steps.

    It must be made before whoever exchanges gradients puts hooks on the parameters: it looks at this rank's own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = dict(model.named_parameters())
        self.parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self.reads = WatchReads(parameters, lambda _: None)
        self.is_paused = False
        self.process = os.getpid()  # a loader's workers inherit the watch
        self.steps: list[SeenStep] = []
        self.arrivals: dict[str, None] = {}
        self.activation_bytes = 0
        self._begin_step()
        self._undo: list[Callable[[], None]] = []
        self._stance: Any = None
        self.hang_on()

    def _begin_step(self) -> None:
        self.forward = self.backward = 0.0
        self.since: float | None = None  # the beginning of this pass
        self.is_backward = False
        self.arrived = 0.0  # when the last gradient became final
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # storages of this forward
        self.left: dict[str, Tensor] = {}  # rows of gradients that were there when the last backward began
        self.looked = dict.fromkeys(self.reads.readings, 0)  # look-ups there had been then
        self.task = -1  # the last backward, by torch's number
        self.fresh: dict[int, set[str]] = {}  # by backward, tables that were looked up since the one before

    def hang_on(self) -> None:
        """Its hooks are on the parameters."""
        self._undo = [
            on_grad_accumulated(parameter, self, partial(LoopWatch._arrived, name=name)).remove
            for name, parameter in self.parameters.items()
        ]

    def let_go(self) -> None:
        """Its hooks are off the parameters, until it hangs on again."""
        for undo in self._undo:
            undo()

    def begin(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")
        _push_mode(self)

    def end(self) -> None:
        """Nothing of the watch is left; a second time does nothing. The script may have opened modes of its own since,
        and not closed them yet."""
        self.let_go()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
        self._stance = None
        above = []
        if self in _get_current_dispatch_mode_stack():
            while (top := _pop_mode()) is not self:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def told(self) -> Told:
        seen = {
            name: SeenParameter(tuple(one.gathers), tuple(one.dense), tuple(one.refusals), one.is_rewritten)
            for name, one in self.reads.readings.items()
        }
        return Told(seen, tuple(self.steps), tuple(self.arrivals), self.activation_bytes)

    def take(self) -> None:
        """The optimizer has stepped."""
        self._turn_to(False)
        self.steps.append(SeenStep(self.reads.take(), self.forward, self.backward))
        self._begin_step()

    def _left(self) -> dict[str, Tensor]:
        """By table: where the loop drops gradients before it, as most do, there are none to look at."""
        by_row = {name: one for name, one in self.reads.readings.items() if one.gathers and not one.dense}
        gradients = {name: one.parameter.grad for name, one in by_row.items()}
        return {name: rows_of(gradient) for name, gradient in gradients.items() if gradient is not None}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_backward = torch._C._current_graph_task_id() != -1
        is_step = (is_backward or torch.is_grad_enabled()) and not self.is_paused
        if not is_step:
            return func(*args, **kwargs)
        is_reader = self.reads.touches((*args, *kwargs.values()))
        is_turn = (is_backward is not self.is_backward or self.since is None) and (is_backward or is_reader)
        is_turn |= torch._C._current_graph_task_id() > self.task
        is_kept = self.since is not None and not is_backward and not self.steps and not func.is_view
        if not (is_reader or is_turn or is_kept) or os.getpid() != self.process:
            return func(*args, **kwargs)
        if is_turn:
            self._turn_to(is_backward)  # a forward begins with the first parameter
        self.reads.counts_lookups = not is_backward
        result = self.reads.noted(func, args, kwargs) if is_reader else func(*args, **kwargs)
        if is_kept or (is_turn and not is_backward and not self.steps and not func.is_view):
            for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                    storage = leaf.untyped_storage()
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def _turn_to(self, is_backward: bool) -> None:
        """Another pass begins, or the step is over. What runs between a backward and the next forward is neither."""
        now = time.perf_counter()
        if is_backward and (task := torch._C._current_graph_task_id()) > self.task:
            self.task, self.left = task, self._left()
            counts = {name: len(reading.pending) for name, reading in self.reads.readings.items()}
            self.fresh[task] = {name for name, count in counts.items() if count > self.looked[name]}
            self.looked = counts
        if self.since is not None and self.is_backward:
            self.backward += max(0.0, self.arrived - self.since)
        elif self.since is not None and is_backward:
            self.forward += now - self.since
            there = sum(size for storage, size in self.made.values() if not storage.expired())
            self.activation_bytes = max(self.activation_bytes, there)
        self.since, self.is_backward = now, is_backward

    def _arrived(self, parameter: Tensor, name: str) -> None:
        if parameter.grad is None:  # a hook took it, which will be refused
            return
        self.arrived = time.perf_counter()
        self.arrivals.pop(name, None)  # the last time counts
        self.arrivals[name] = None
        reading = self.reads.readings[name]
        fresh = self.fresh.get(torch._C._current_graph_task_id(), {name})
        if reading.gathers and reading.pending and name not in fresh:
            reading.refusals.add(LATE)
        rows = self.left.get(name, NO_LOOKUPS.rows)
        left = replace(NO_LOOKUPS, rows=rows, counts=torch.zeros_like(rows))
        if has_unseen_reader(reading, merged([left, *reading.pending])):
            reading.dense.add(UNSEEN)
