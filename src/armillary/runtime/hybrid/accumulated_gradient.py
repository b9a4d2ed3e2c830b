"""What stands for the gradient of a row-sharded table while it accumulates: there is one, and it can be thrown away.

It waits in the look-ups of this rank (`table.py`), so nothing else can be asked of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from armillary.runtime.hybrid.gradient_handle import METADATA

__all__ = ["AccumulatedGradient"]


class Accumulator(Protocol):
    """The table behind it."""

    name: str

    def drop_accumulated(self) -> None: ...


class AccumulatedGradient(Tensor):
    """Seen for a moment, as `handle.grad`."""

    table: Accumulator

    @staticmethod
    def __new__(cls, table: Accumulator, like: Tensor) -> "AccumulatedGradient":
        gradient: AccumulatedGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        gradient.table = table
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AccumulatedGradient({self.table.name!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name, found = getattr(func, "__name__", str(func)), _all_in(args)
        if name in ("zero_", "_foreach_zero_"):
            for one in found:
                one.table.drop_accumulated()
            others = [one for one in _flat(args) if not isinstance(one, AccumulatedGradient)]
            if others:
                torch._foreach_zero_(others)
            return args[0]
        raise RuntimeError(
            f"{', '.join(one.table.name for one in found)}: {name} of a gradient that accumulates on this rank and was "
            "not exchanged (run.no_sync); ask after the backward outside it, or set it to None"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)


def _flat(args: Any) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def _all_in(args: Any) -> list[AccumulatedGradient]:
    return [one for one in _flat(args) if isinstance(one, AccumulatedGradient)]
