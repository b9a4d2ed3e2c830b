"""A table while it is being initialised: of the global shape, holding only the rows this worker owns.

One process fills a table from one random stream. To begin with the same values, every worker draws that stream in
full, a block of rows at a time, and keeps its own rows; so a table may be larger than any worker's memory. The stream
of torch's CPU generator can be drawn in blocks bit for bit (measured on torch 2.13, every floating dtype): `uniform_`
in any blocks; `normal_` draws 16 numbers at a time and draws the last 16 of a tensor anew if its size is no multiple
of 16, so blocks are multiples of 16 numbers and the last one has at least 16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.ownership import Ownership

__all__ = ["BLOCK_BYTES", "BlankTable"]

BLOCK_BYTES = 4 << 20
GROUP = 16  # numbers that normal_ draws together

aten = torch.ops.aten


class BlankTable(Tensor):
    """Rows [first, first + shape[0]) of a table. shard: (local rows, *row shape), shared by all slices of the table.

    What `reset_parameters` does to a weight works: `normal_`, `uniform_`, `fill_`, `zero_`, `copy_`, `mul_`, `div_`,
    `clamp_` by numbers, the `torch.nn.init` functions made of them, and all of it on one row or a range of rows.
    """

    _is_param = True
    title: str
    ownership: Ownership
    rank: int
    shard: Tensor
    first: int

    @staticmethod
    def __new__(
        cls, title: str, shape: Sequence[int], ownership: Ownership, rank: int, shard: Tensor, first: int = 0
    ) -> "BlankTable":
        blank: BlankTable = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=shard.dtype, device=torch.device("cpu")
        )
        blank.title, blank.ownership, blank.rank, blank.shard, blank.first = title, ownership, rank, shard, first
        return blank

    @classmethod
    def of(cls, title: str, like: Tensor, ownership: Ownership, rank: int) -> "BlankTable":
        """A table like `like` (which needs no storage) on the CPU; its rows are not a number until they are filled."""
        shard = torch.empty((ownership.shard_rows(rank), *like.shape[1:]), dtype=like.dtype)
        shard.fill_(float("nan") if like.dtype.is_floating_point else 0)
        return cls(title, like.shape, ownership, rank, shard)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlankTable({self.title!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        blank, rest = args[0], args[1:]
        if isinstance(blank, BlankTable) and not any(isinstance(arg, BlankTable) for arg in rest):
            if func in (aten.detach.default, aten.alias.default):
                return cls(blank.title, blank.shape, blank.ownership, blank.rank, blank.shard, blank.first)
            if func in _VIEWS and (view := _VIEWS[func](blank, *rest)) is not None:
                return view
            if func is aten.copy_.default:
                return _copy(blank, rest[0])
            if func in _DRAWS or (func in _SCALES and not any(_is_tensor(arg) for arg in rest)):
                return _fill(blank, lambda block, first: func(block, *rest, **(kwargs or {})), func in _SCALES)
        owner = next((arg.title for arg in args if isinstance(arg, BlankTable)), "a row-sharded table")
        raise ValueError(  # a TypeError would be taken for "try the other operand"
            f"{owner}: {func} cannot be done in blocks of rows while a meta-device model is initialised; use normal_, "
            "uniform_, fill_, zero_ or copy_ in reset_parameters, or plan it 'replicated'"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _spans(rows: int, row_numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows as the random stream wants them."""
    step = max(1, BLOCK_BYTES // max(1, row_numel * itemsize * GROUP)) * GROUP
    first = 0
    while first < rows:
        last = first + step
        if (rows - last) * row_numel < GROUP:
            last = rows
        yield first, last
        first = last


def _fill(blank: BlankTable, write: Callable[[Tensor, int], Any], reads: bool = False) -> BlankTable:
    """Calls write(block, first row) on one block after the other and keeps the rows owned here. reads: the block holds
    the present values (of the rows owned here) before."""
    row_numel = blank.shape[1:].numel()
    for first, last in _spans(blank.shape[0], row_numel, blank.shard.element_size()):
        places, local = _owned(blank, first, last)
        block = torch.empty((last - first, *blank.shape[1:]), dtype=blank.dtype)
        if reads:
            block[places] = blank.shard[local]
        write(block, first)
        blank.shard.index_copy_(0, local, block[places])
    return blank


def _owned(blank: BlankTable, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Of a block of rows: where those owned here stand in it, and where in the shard."""
    if blank.rank not in blank.ownership.owners:
        none = torch.empty(0, dtype=torch.int64)
        return none, none
    keys = blank.ownership.keys(torch.arange(blank.first + first, blank.first + last))
    owner = torch.div(keys, blank.ownership.capacity, rounding_mode="floor")
    places = (owner == blank.ownership.owners.index(blank.rank)).nonzero().squeeze(1)
    return places, keys[places] % blank.ownership.capacity


def _copy(blank: BlankTable, source: Tensor) -> BlankTable:
    whole = source.expand(blank.shape)
    return _fill(blank, lambda block, first: block.copy_(whole[first : first + len(block)]))


def _row(blank: BlankTable, dim: int, index: int) -> Tensor | None:
    """One row: the shard's own if it is owned here, else one that nobody looks at (random numbers are drawn alike)."""
    if dim != 0:
        return None
    row = index % blank.shape[0]
    places, local = _owned(blank, row, row + 1)
    return blank.shard[local[0]] if len(places) else blank.shard.new_full(blank.shape[1:], float("nan"))


def _slice(
    blank: BlankTable, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    if dim != 0 or step != 1:
        return None
    first, last, _ = slice(start, end).indices(blank.shape[0])
    shape = (max(0, last - first), *blank.shape[1:])
    return BlankTable(blank.title, shape, blank.ownership, blank.rank, blank.shard, blank.first + first)


_VIEWS: dict[Any, Callable[..., Tensor | None]] = {aten.select.int: _row, aten.slice.Tensor: _slice}
_DRAWS = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
_SCALES = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default}
