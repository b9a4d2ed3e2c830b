"""How long each stage of a model takes in one step, forward and backward.

Kept apart from the counting of operations, because counting slows a pass down.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from armillary.facts.stage_paths import OUTSIDE

__all__ = ["StageClock"]


class StageClock:
    """Forward and backward seconds by stage, of one step; `enter` and `leave` are for `following`.

    In the backward pass a stage begins when the gradient of its output is there and ends when the gradient of
    its input is, or another stage begins. Where branches interleave, time between two such events goes to the
    stage whose event came first. On an accelerator every change of stage waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path = [OUTSIDE]
        self.current = OUTSIDE
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.backward: defaultdict[str, float] = defaultdict(float)
        self.handles: list[Any] = []
        self.charged = self.forward
        self.since = self._now()

    def enter(self, stage: str, inputs: Any) -> None:
        if stage != self.path[-1]:
            self._hook(inputs, lambda: self._turn_to(OUTSIDE) if self.current == stage else None)
        self.path.append(stage)
        self._turn_to(stage)

    def leave(self, stage: str, outputs: Any) -> None:
        self.path.pop()
        if stage != self.path[-1]:
            self._hook(outputs, lambda: self._turn_to(stage))
        if self.charged is self.forward:  # in a backward pass a checkpointed stage ran again: its backward follows
            self._turn_to(self.path[-1])

    def begin_backward(self) -> None:
        self._turn_to(OUTSIDE, always=True)
        self.charged = self.backward

    def end(self) -> None:
        self._turn_to(OUTSIDE, always=True)
        for handle in self.handles:
            handle.remove()

    def _hook(self, tensors: Any, event: Callable[[], None]) -> None:
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.handles.append(leaf.register_hook(lambda _: event()))

    def _turn_to(self, stage: str, always: bool = False) -> None:
        if stage != self.current or always:
            now = self._now()
            self.charged[self.current] += now - self.since
            self.current, self.since = stage, now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
