"""The user's autocast, entered again: a micro-batch's forward may run after the step that handed it in has returned.

Forward and loss of a step run under the autocast that was on when it was handed in, whoever calls the runtime when they
are due; backward and the optimizer run without, as torch recommends. Casts of weights are kept within one stage's
forward only: torch keeps them until the outermost region ends, which here might be the whole training.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Autocast", "device_type_of", "without_autocast"]


@dataclass(frozen=True)
class Autocast:
    """What is on for the tensors of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast to {str(self.dtype).removeprefix('torch.')}" if self.enabled else "no autocast"

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    @contextmanager
    def again(self) -> Iterator[None]:
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled):
                yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False):
        yield


def device_type_of(tensors: Iterable[Tensor]) -> str:
    """Of the first of them; the host's if there is none."""
    return next((tensor.device.type for tensor in tensors), "cpu")
