"""Buffers as the forwards of a stage found them, for those forwards that run again before their backward.

A second run reads what the first one read, and moves nothing a second time. Copies are kept only of buffers that were
written since. That is seen by values: torch's batch norm raises no version counters (torch 2.13).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn

__all__ = ["Found", "FoundBuffers"]


@dataclass(eq=False)
class Found:
    """What one forward found in the buffers that it or a later one has written, by name."""

    written: dict[str, Tensor] = field(default_factory=dict)


class FoundBuffers:
    """Of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._pending = WeakSet[Found]()  # of forwards that may still run again

    @contextmanager
    def forward(self) -> Iterator[Found]:
        """Around a forward that is to run again, as long as what it found is held."""
        found = Found()
        self._pending.add(found)
        before = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        yield found
        for name, buffer in self._module.named_buffers():
            if not torch.equal(buffer, before[name]):
                for one in self._pending:
                    one.written.setdefault(name, before[name])

    def again(self, found: Found) -> dict[str, Tensor]:
        """What stands in the places of all buffers while that forward runs again; it may write them."""
        return {name: found.written.get(name, buffer).clone() for name, buffer in self._module.named_buffers()}
