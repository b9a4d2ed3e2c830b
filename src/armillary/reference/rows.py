"""The truth of coded rows: inside one graph, a look-up gives what a codec means of each row, and so do gradients back.

Rows are coded one by one where they are read, and the table is as it was. Of one look-up, gradients of equal rows are
added up first, and what is coded is the part of the mean that they are. No gradient flows through a codec, it passes by
it. Nothing is imported of the runtime, nor of the exchange that does this.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["CodedReads", "Meanings"]

Meaning = Callable[[Tensor], Tensor]  # of rows (k, *row), one by one


class Meanings(NamedTuple):
    """What arrives of rows that are read, and of their gradients."""

    rows: Meaning
    gradients: Meaning


class CodedReads(TorchFunctionMode):
    """Inside, look-ups of these tables read coded rows.

    Args:
        meanings: by table. part: of the mean that this worker's gradients are.
    """

    def __init__(self, meanings: Mapping[Tensor, Meanings], part: float) -> None:
        super().__init__()
        self._meanings, self._part = meanings, part

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if not any(isinstance(one, Tensor) and one in self._meanings for one in given):
            return func(*args, **kwargs)
        if func in (functional.embedding, functional.embedding_bag):
            return self._embedded(func, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor):
            rows, places, _ = self._read(args[0], torch.where(args[1] < 0, args[1] + len(args[0]), args[1]))
            return rows[places]
        if func in (Tensor.index_select, torch.index_select):
            rows, places, _ = self._read(args[0], kwargs["index"] if "index" in kwargs else args[2])
            return rows[places]
        return func(*args, **kwargs)  # shape, dtype, grad and the like

    def _embedded(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        asked = signature(func).bind(*args, **kwargs).arguments
        rows, places, distinct = self._read(asked["weight"], asked["input"])
        padding = asked.get("padding_idx")
        if padding is not None:
            there = (distinct == padding % len(asked["weight"])).nonzero()
            padding = int(there) if len(there) else None
        return func(**{**asked, "input": places, "weight": rows, "padding_idx": padding, "sparse": False})

    def _read(self, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coded rows that are read, each once; where each id stands among them; which they are."""
        distinct, places = torch.unique(ids, return_inverse=True)
        meanings = self._meanings[table]
        coded: Tensor = _Coded.apply(table[distinct], meanings, self._part)  # type: ignore[no-untyped-call]
        return coded, places, distinct


class _Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, meanings: Meanings, part: float) -> Tensor:
        ctx.gradients, ctx.part = meanings.gradients, part
        return meanings.rows(rows).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradients(gradient * ctx.part), None, None
