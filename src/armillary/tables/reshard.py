"""Rows on the way between their owners and contiguous blocks, a bounded number at a time.

Owners are dealt rows for balance (neighbouring rows live on different workers); files and plain PyTorch want them in
order. `to_spans` brings each rank the contiguous span of rows it is to write, `from_spans` takes what each rank read
back to the owners. Both are rounds of one all-to-all, whose buffers hold `BLOCK_BYTES` at most however large the table.

Rows travel as bytes, so any dtype does.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.ownership import Ownership
from armillary.plans.requests import AllToAll
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = ["BLOCK_BYTES", "RowSpan", "all_on_first", "block_rows", "equal_spans", "from_spans", "to_spans"]

BLOCK_BYTES = 16 << 20


class RowSpan(NamedTuple):
    """Rows [first, last)."""

    first: int
    last: int


def equal_spans(rows: int, workers: int) -> tuple[RowSpan, ...]:
    """Contiguous blocks of ceil(rows / workers) rows, one per rank; the last ones may be short or empty."""
    size = -(-rows // workers)
    return tuple(RowSpan(min(rank * size, rows), min(rank * size + size, rows)) for rank in range(workers))


def all_on_first(rows: int, workers: int) -> tuple[RowSpan, ...]:
    """Every row on rank 0."""
    return (RowSpan(0, rows), *[RowSpan(rows, rows)] * (workers - 1))


def block_rows(like: Tensor) -> int:
    """How many rows of a tensor (rows, *row shape) fit into a block; at least one."""
    return max(1, BLOCK_BYTES // max(1, _row_numel(like) * like.element_size()))


class Routes(NamedTuple):
    """Of the rows of one window, in order: the place of each one's owner among the owners, and its local row there."""

    owner: Tensor
    local: Tensor


def to_spans(
    shard: Tensor, table: RowTable, spans: tuple[RowSpan, ...], transport: Transport
) -> Iterator[tuple[int, Tensor]]:
    """Collective where the table is owned by the workers. shard: (local rows, *row shape), weights or optimizer state.

    Yields:
        (first row, rows on the CPU) of consecutive blocks of this rank's span; every rank sees as many blocks, some of
        them empty.
    """
    step, mine = block_rows(shard), spans[table.place.rank]
    for number in range(_rounds(spans, step)):
        windows = [_window(span, number, step) for span in spans]
        window = windows[table.place.rank]
        if not table.is_pulled:
            yield window.first, shard[window.first : window.last].detach().cpu()
            continue
        routes = [_routes(other, table.ownership) for other in windows]
        asked = [_local_rows_of(table, route) for route in routes]
        rows = shard.detach().index_select(0, torch.cat(asked).to(shard.device)).cpu()
        own = routes[table.place.rank]
        arrived = _travel(rows, [len(local) for local in asked], _counts(table, own), table, transport)
        block = torch.empty_like(arrived)
        block[torch.argsort(own.owner, stable=True)] = arrived
        assert window.first >= mine.first or not len(block)
        yield window.first, block


def from_spans(
    read: Callable[[int, int], Tensor], into: Tensor, table: RowTable, spans: tuple[RowSpan, ...], transport: Transport
) -> None:
    """Collective. read(first, last) gives rows of this rank's span, (last - first, *row shape), in any floating dtype;
    `into` (local rows, *row shape) receives the rows this rank owns."""
    step = block_rows(into)
    for number in range(_rounds(spans, step)):
        windows = [_window(span, number, step) for span in spans]
        routes = [_routes(window, table.ownership) for window in windows]
        own, window = routes[table.place.rank], windows[table.place.rank]
        rows = read(window.first, window.last).to(into.dtype)[torch.argsort(own.owner, stable=True)]
        mine = [_local_rows_of(table, route) for route in routes]
        arrived = _travel(rows, _counts(table, own), [len(local) for local in mine], table, transport)
        into.index_copy_(0, torch.cat(mine).to(into.device), arrived.to(into.device))


def _rounds(spans: tuple[RowSpan, ...], step: int) -> int:
    return max(-(-(span.last - span.first) // step) for span in spans)


def _window(span: RowSpan, number: int, step: int) -> RowSpan:
    """The part of a span that belongs to a round."""
    first = min(span.first + number * step, span.last)
    return RowSpan(first, min(first + step, span.last))


def _routes(window: RowSpan, ownership: Ownership) -> Routes:
    keys = ownership.keys(torch.arange(window.first, window.last))
    return Routes(torch.div(keys, ownership.capacity, rounding_mode="floor"), keys % ownership.capacity)


def _local_rows_of(table: RowTable, routes: Routes) -> Tensor:
    """Local rows, on this rank, of the rows of a window that it owns."""
    owners = table.ownership.owners
    if table.place.rank not in owners:
        return routes.local[:0]
    return routes.local[routes.owner == owners.index(table.place.rank)]


def _counts(table: RowTable, routes: Routes) -> list[int]:
    """How many rows of a window each rank owns."""
    by_place = torch.bincount(routes.owner, minlength=len(table.ownership.owners)).tolist()
    counts = [0] * table.place.workers
    for place, rank in enumerate(table.ownership.owners):
        counts[rank] = by_place[place]
    return counts


def _travel(rows: Tensor, send: list[int], receive: list[int], table: RowTable, transport: Transport) -> Tensor:
    as_bytes = rows.contiguous().view(len(rows), _row_numel(rows)).view(torch.uint8)
    arrived = transport.start(AllToAll(as_bytes, tuple(send), tuple(receive)), table.name)()
    whole: Tensor = arrived.contiguous().view(rows.dtype).view(len(arrived), *rows.shape[1:])
    return whole


def _row_numel(tensor: Tensor) -> int:
    numel = 1
    for size in tensor.shape[1:]:
        numel *= size
    return numel
