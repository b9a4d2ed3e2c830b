"""Bytes of the tensors autograd has saved and not yet let go, every storage counted once, parameters left out.

A second, finer instrument beside the kernel's: exact at every moment, but blind to what is not saved for a backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Ledger:
    """`live_bytes` now, and the most there was."""

    def __init__(self, parameters: Callable[[], set[int]]) -> None:
        self._parameters = parameters  # storages that are weights, of any version
        self._holders: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def enter(self, storage: int, size: int) -> None:
        self._holders[storage] = self._holders.get(storage, 0) + 1
        if self._holders[storage] == 1:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def leave(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.live_bytes -= size

    @contextmanager
    def watching(self) -> Iterator["Ledger"]:
        """Everything saved inside is entered."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield self

    def _pack(self, tensor: Tensor) -> "_Saved":
        return _Saved(tensor.detach(), None if tensor.untyped_storage().data_ptr() in self._parameters() else self)


class _Saved:
    def __init__(self, tensor: Tensor, ledger: Ledger | None) -> None:
        self.tensor, self.ledger = tensor, ledger
        storage = tensor.untyped_storage()
        self.entry = storage.data_ptr(), storage.nbytes()
        if ledger is not None:
            ledger.enter(*self.entry)

    def __del__(self) -> None:
        if self.ledger is not None:
            self.ledger.leave(*self.entry)
