"""The buffers of a stage that several ranks run by turns: what forwards write goes on to the rank that runs it next.

Buffers that no forward writes (masks) stay where they are; one that was written goes on for good, since a later rank
may only read it. Which are written is seen by their values: torch's batch norm writes running statistics without
raising their version counters (torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["StageBuffers"]


class StageBuffers:
    """Of one stage here: `adopt` what others have written, run a forward, and hand on what is `packed`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written = set[int]()  # by any forward so far, on any rank
        self._before: list[Tensor] = []  # copies, of before the forward
        self._look()

    def _look(self) -> None:
        self._before = [buffer.clone() for buffer in self._module.buffers()]

    def adopt(self, leaves: list[Any]) -> None:
        """As they were packed elsewhere."""
        places, tensors = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
        own = list(self._module.buffers())
        for place, tensor in zip(places, tensors, strict=True):
            own[place].copy_(tensor)
        self._written |= set(places)
        self._look()

    def packed(self) -> list[Any]:
        """Which they are, and copies of them."""
        own = list(self._module.buffers())
        pairs = zip(own, self._before, strict=True)
        self._written |= {place for place, (now, then) in enumerate(pairs) if not torch.equal(now, then)}
        self._before = []
        places = sorted(self._written)
        return [*places, *(own[place].clone() for place in places)]
