"""Bytes of the tensors that are made inside and still alive: now, and the most there were.

Every operation's results are seen, in backward too. What a kernel needs for itself while it runs is not (im2col of a
convolution, a library's scratch), nor what another thread makes. Works alike for every device and allocator.

Source: torch.distributed._tools.mem_tracker, which is private, does the same by module.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Outside, what was made inside is still followed until it is freed; nothing new is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = self.most_bytes = self.base_bytes = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def mark(self) -> None:
        """From here on `added_bytes` is told."""
        self.base_bytes = self.most_bytes = self.now_bytes

    @property
    def added_bytes(self) -> int:
        """The most there were since `mark`, beyond those there were then."""
        return self.most_bytes - self.base_bytes

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):  # of before this began, or made where nobody looked
            self._follow(storage, 0)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._follow(storage, storage.nbytes())
        return out

    def _follow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self._seen.pop(key, None)
            self.now_bytes -= nbytes

        self._seen[key] = weakref.ref(storage, freed)
        self.now_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.now_bytes)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            yield leaf.untyped_storage()
