"""Carries out a choice of residencies by hooks on the stages' modules, in whatever loop trains the model.

Forward waits where more stages are on their way out than there are slots. As backward of a stage begins, which the
gradient of its output tells, the reads begin down to `slots` - 1 stages below it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from armillary.residency.recompute import run_again_in_backward
from armillary.residency.stage_costs import RECOMPUTE, SWAP
from armillary.residency.swap import StageSaves, Stored, Waits, storage_of
from armillary.residency.tier import Tier

__all__ = ["Hooks"]


@dataclass
class _Pass:
    """One forward through the stages, and what of it is away: by stage."""

    away: dict[int, list[Stored]] = field(default_factory=dict)
    entered: int = -1
    began: float = field(default_factory=time.perf_counter)
    is_timed: bool = False
    is_backward: bool = False


class Hooks:
    """On from construction until `remove`.

    Args of note:
        ended: told the seconds of each pass, first stage to the end of backward.
        repeated: stages that a pass may enter again.
    """

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        residencies: Sequence[str],
        slots: int,
        tier: Tier | None,
        waits: Waits,
        ended: Callable[[float], None],
        repeated: Collection[int] = (),
    ) -> None:
        self._repeated = repeated
        self._slots, self._tier, self._waits = slots, tier, waits
        self._ended, self._last = ended, len(stages) - 1
        self._device = next(
            (one.device for stage in stages.values() for one in stage.parameters()), torch.device("cpu")
        )
        self._pass = _Pass()
        self._open: list[StageSaves] = []
        self._undo: list[Callable[[], None]] = []
        for number, ((path, stage), residency) in enumerate(zip(stages.items(), residencies, strict=True)):
            if residency == RECOMPUTE:
                self._undo.append(run_again_in_backward(stage))
            self._follow(number, path, stage, residency == SWAP)

    def remove(self) -> None:
        """The modules are as they were. Backward passes of forwards that ended may still come."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _follow(self, number: int, path: str, stage: nn.Module, is_swapped: bool) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self._enter(number)
                if is_swapped:  # weights move, under DDP and others, so what stays is asked each time
                    stays = _storages([args, kwargs, *stage.parameters(), *stage.buffers()])
                    self._open.append(StageSaves(path, stays, self._waits))
                    self._open[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self._leave(number, is_swapped, output)

        self._undo.append(stage.register_forward_pre_hook(enter, with_kwargs=True).remove)
        self._undo.append(stage.register_forward_hook(leave, always_call=True).remove)

    def _enter(self, number: int) -> None:
        if self._pass.is_backward or (number <= self._pass.entered and number not in self._repeated):
            self._pass = _Pass()
        self._pass.entered = max(number, self._pass.entered)

    def _leave(self, number: int, is_swapped: bool, output: Any) -> None:
        here = self._pass
        if is_swapped:
            saves = self._open.pop()
            saves.__exit__(None, None, None)
            assert self._tier is not None
            if output is not None:  # None where its forward raised
                here.away[number] = saves.leave(_storages(output), self._tier)
        for stage in sorted(here.away):
            if stage <= number - self._slots:
                for one in here.away[stage]:
                    one.wait_until_gone(self._waits)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._read_ahead(here, number))

    def _read_ahead(self, here: _Pass, number: int) -> None:
        """Backward of a stage begins."""
        here.is_backward = True
        if number == self._last and not here.is_timed:
            here.is_timed = True
            end: Any = torch.autograd.Variable._execution_engine  # as DDP and FSDP learn that a backward has ended
            end.queue_callback(lambda: self._end(here))
        for stage in sorted(here.away, reverse=True):
            if stage > number - self._slots:
                for one in reversed(here.away.pop(stage)):
                    one.fetch(self._waits)

    def _end(self, here: _Pass) -> None:
        if self._device.type == "cuda":  # a wait of launches only: reads were waited for all along
            torch.cuda.synchronize(self._device)
        self._ended(time.perf_counter() - here.began)


def _storages(tree: Any) -> frozenset[int]:
    """Addresses of the storages of all tensors in it."""
    storages = (storage_of(one) for one in tree_leaves(tree) if isinstance(one, Tensor))
    return frozenset(storage._cdata for storage in storages if storage is not None)
