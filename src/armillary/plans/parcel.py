"""The tensors of one group in one flat tensor: how they lie side by side, and what a rank gives an exchange and gets.

Bucket, price and saved state read the same lengths in a `Layout`. Every tensor begins at a multiple of `align` numbers,
so that a tile of a codec never holds numbers of two parameters: one scale for both would move the smaller one.

A `Parcel` is the values of a group, and a tail of counts behind them. The tail is kept apart because it must arrive
exactly, whatever is done to the values: one flag of use per parameter and, where an exchange keeps state, a non-finite
flag. Its sums say which parameters no rank used (their gradient stays None) and how many ranks hold numbers that are
not finite. Weights of batches are not in it: all ranks know their sum before the values leave. Of a large tensor whose
gradient lists its rows only those are kept. All that an exchange knows of other ranks is `RankInfo`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from armillary.plans.profile import ParameterFact

__all__ = [
    "Layout",
    "Parcel",
    "RankInfo",
    "Rows",
    "Span",
    "State",
    "gaps_of",
    "layout_of",
    "parted",
    "touched_rows",
    "without_gaps",
]


@dataclass(frozen=True)
class Layout:
    """Tensors of one dtype in one flat tensor, zeros between them where they are aligned.

    Args of note:
        dtype: as in "float32".
        align: every tensor begins at a multiple of so many numbers.
        is_guarded: whether the tail ends with a non-finite flag, 1 where this rank's numbers are not all finite.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    align: int = 1
    is_guarded: bool = False

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or len(set(self.names)) != len(self.names) or not self.names:
            raise ValueError(f"layout: want a shape for each of different names, got {self.names} and {self.shapes}")
        if self.align < 1:
            raise ValueError(f"layout: want tensors aligned to 1 number or more, got {self.align}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, in numbers; and the length of all of them."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + math.ceil(math.prod(shape) / self.align) * self.align)
        return tuple(ends)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last number of every tensor, the last not included; what is between two spans is zero."""
        return [(at, at + math.prod(shape)) for at, shape in zip(self.offsets, self.shapes, strict=False)]

    @property
    def numel(self) -> int:
        """Of all tensors, with the zeros between them."""
        return self.offsets[-1]

    @property
    def tail(self) -> int:
        """Numbers behind the values: a flag of use per tensor, and the non-finite flag."""
        return len(self.names) + self.is_guarded

    @property
    def item_bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.numel * self.item_bytes

    @property
    def joined_bytes(self) -> int:
        """Of the values with the tail behind them in the same dtype."""
        return (self.numel + self.tail) * self.item_bytes


def layout_of(facts: Iterable[ParameterFact], align: int = 1, is_guarded: bool = False) -> Layout:
    """That of parameters of one dtype, in this order."""
    members = tuple(facts)
    shapes = tuple(fact.shape for fact in members)
    return Layout(tuple(fact.name for fact in members), shapes, members[0].dtype, align, is_guarded)


@dataclass(frozen=True)
class RankInfo:
    """Where a rank stands: its number, how many ranks there are, and how many share its node."""

    rank: int
    workers: int
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.workers or self.workers % self.workers_per_node:
            raise ValueError(f"exchange: no such place: {self}")

    @property
    def node(self) -> int:
        return self.rank // self.workers_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.workers_per_node

    @property
    def nodes(self) -> int:
        return self.workers // self.workers_per_node


State = dict[str, Tensor]  # by entry: flat, parameter after parameter (`DenseExchange.span`)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one tensor; all others are zero.

    Args:
        numbers: (n,) int64, ascending, each once.
        values: (n, *row).
    """

    numbers: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Parcel:
    """
    Args:
        values: (layout.numel,) in the parameters' dtype: this rank's parts of the mean gradient, or its weights; as a
            result, what takes their place.
        tail: (layout.tail,) float64, whole numbers; as a result, their sums over ranks.
        whole: (layout.numel + layout.tail,): values and tail in the dtype of the values, where they lie so already. It
            is given away: the result may take its place.
        scale: by which a GradScaler multiplied the values, the same on every rank; states are kept without it.
        rows: of tensors that are known by their rows, by number; `values` are zero there. Only for an exchange that
            `takes_rows`.
    """

    values: Tensor
    tail: Tensor
    layout: Layout
    whole: Tensor | None = None
    scale: float = 1.0
    rows: Mapping[int, Rows] = field(default_factory=dict)

    @property
    def used(self) -> Tensor:
        """(parameters,): 1 where this rank uses the parameter; as a result, how many ranks do."""
        return self.tail[: len(self.layout.names)]

    @property
    def nonfinite(self) -> float:
        """1 if this rank's numbers are not all finite; as a result, how many ranks' are not. 0 where nobody looks."""
        return float(self.tail[-1]) if self.layout.is_guarded else 0.0

    def joined(self) -> Tensor:
        """(layout.numel + layout.tail,): values and tail in the dtype of the values, to travel as one tensor.

        Sums of the tail stay whole numbers up to 2 / eps ranks: 256 in bfloat16, 2,048 in float16. With more ranks a
        count may be rounded, but it is zero only where every rank has zero, and nobody asks more of it.
        """
        return torch.cat([self.values, self.tail.to(self.values)]) if self.whole is None else self.whole

    def room(self) -> Tensor:
        """(layout.numel,) in the dtype of the values, for a result, holding anything: the values' own place if they are
        given away, since pages of new memory take longer to come than numbers to be written."""
        return torch.empty_like(self.values) if self.whole is None else self.values

    def answered(self, values: Tensor, tail: Tensor, rows: Mapping[int, Rows] | None = None) -> "Parcel":
        """A result."""
        return Parcel(values, tail, self.layout, rows=rows or {})


def parted(total: Tensor, layout: Layout) -> Parcel:
    """The result from the sum of `Parcel.joined` over ranks."""
    values, tail = total.split_with_sizes((layout.numel, layout.tail))
    return Parcel(values, (tail.real if tail.is_complex() else tail).double(), layout, total)


def touched_rows(tensor: Tensor) -> Tensor:
    """Numbers of the rows that are not all zero, (touched,), ascending. Whole tables are asked, so nothing as large as
    one is made on the way: what comparing with zero makes takes longer than reading."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    rows = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = rows.reshape(len(rows), -1)
    return ((flat.amax(1) != 0) | (flat.amin(1) != 0)).nonzero().flatten()


Span = tuple[int, int]  # first and last number, the last not included


def gaps_of(layout: Layout) -> list[Span]:
    """Between tensors."""
    ends = [end for _, end in layout.spans]
    return [(end, begin) for end, begin in zip(ends, layout.offsets[1:], strict=True) if begin > end]


def without_gaps(values: Tensor, gaps: Sequence[Span], at: int = 0) -> Tensor:
    """In place: zeros there. at: where among the group's numbers the values begin."""
    for begin, end in gaps:
        if begin < at + len(values) and end > at:
            values[max(0, begin - at) : end - at] = 0
    return values
