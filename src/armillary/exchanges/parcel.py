"""What one rank gives to a dense exchange and gets from it: the values of a group, and a tail of counts behind them.

The tail is kept apart because it must arrive exactly, whatever is done to the values: one flag of use per parameter
and, where an exchange keeps state, a non-finite flag. Its sums say which parameters no rank used (their gradient stays
None) and how many ranks hold numbers that are not finite. Weights of batches are not in it: all ranks know their sum
before the values leave. Of a large tensor whose gradient lists its rows only those are kept.

All that an exchange knows of other ranks is `RankInfo`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.plans.layout import Layout

__all__ = ["Parcel", "RankInfo", "Rows", "State", "parted", "touched_rows"]


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
