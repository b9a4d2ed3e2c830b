"""Gradients of which most rows are zero, summed on every worker: only rows that some worker touched cross the links.

A gradient that lists its rows sends those, of any other the values decide. They decide how much is sent, never what
arrives: a row that is not sent is zero. A tensor whose rows every rank listed comes back as rows. Where so many
rows are touched that one all-reduce of everything sends less, that is made, on all workers alike. So it is exact for
any parameter, and asks nobody how the parameter is read: what a run takes while it does not know that yet.

Source: SparCML (Renggli et al., SC 2019), sparse all-reduce that turns dense. Departure: rows, not single numbers, and
one gather to all instead of recursive doubling.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.dense import DenseExchange, Leg, PushResult
from armillary.exchanges.exchange import dense_exchange
from armillary.exchanges.owned_rows import merge_rows
from armillary.plans.parcel import Layout, Parcel, RankInfo, Rows, State, touched_rows
from armillary.plans.profile import ParameterFact
from armillary.plans.requests import AllGather, AllReduce, AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["sparse_all_reduce"]

NUMBER_BYTES = 8  # of a number in the header
OWN_NUMBERS = 2  # in the header, before a flag for each tensor and the tail
ID_BYTES = 4


class _Table(NamedTuple):
    """The place of a tensor in a layout: its number there, its values [begin, end), its first row among the rows of
    all."""

    number: int
    begin: int
    end: int
    first_row: int
    rows: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.begin : self.end].view(self.rows, -1)


class _Part(NamedTuple):
    """Rows of one tensor: their numbers, (n,), and what they hold, (n, width)."""

    table: _Table
    numbers: Tensor
    rows: Tensor


def _on_demand(fact: ParameterFact, topology: Topology) -> Sequence[dict[str, Any]]:
    return []


@dense_exchange({}, {"keeps_rows": True}, offers=_on_demand)
def sparse_all_reduce(keeps_rows: bool = False) -> DenseExchange:
    """One small gather (how many rows each worker touched, and the tail), then the rows of all or everything.

    Args:
        keeps_rows: rows travel as rows, however many there are, for an optimizer that takes nothing else.

    Raises:
        ValueError: keeps_rows is neither True nor False.
    """
    if not isinstance(keeps_rows, bool):
        raise ValueError(f"exchange: sparse_all_reduce wants keeps_rows=True or keeps_rows=False, got {keeps_rows!r}")

    def push(parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        values, layout, tables = parcel.values, parcel.layout, list(_tables(parcel.layout))
        ids, rows = _touched(parcel)
        flags = [table.number in parcel.rows for table in tables]
        mine = torch.tensor([len(ids), len(rows), *flags], dtype=torch.float64)
        everyones = yield AllGather(torch.cat([mine, parcel.tail.cpu()]))
        told, flags_told, tails = everyones.split_with_sizes([OWN_NUMBERS, len(tables), layout.tail], 1)
        tail = tails.sum(0).to(parcel.tail)
        counts = [(int(one), int(other)) for one, other in told.tolist()]
        sizes = tuple(count * ID_BYTES + numbers * values.element_size() for count, numbers in counts)
        if not keeps_rows and max(sizes) * place.workers > 2 * values.nbytes:
            for number, listed in parcel.rows.items():
                begin, end = layout.spans[number]
                values[begin:end].view(layout.shapes[number])[listed.numbers] = listed.values
            total = yield AllReduce(values)
            return parcel.answered(total, tail), state
        message = torch.cat([ids.to(torch.int32).view(torch.uint8), rows.view(torch.uint8)])
        send = (len(message),) * place.workers
        gathered = yield AllToAll(message.repeat(place.workers), send, sizes)
        everyones_rows = []
        for piece, (count, _) in zip(gathered.split(sizes), counts, strict=True):  # in the order of ranks
            theirs, numbers = piece.split([count * ID_BYTES, len(piece) - count * ID_BYTES])
            theirs, numbers = theirs.clone().view(torch.int32).long(), numbers.clone().view(values.dtype)
            everyones_rows.append(list(_parts(theirs, numbers, layout)))
        by_row = {table.number for table, every in zip(tables, flags_told.all(0).tolist(), strict=True) if every}
        for table, local, _ in _parts(ids, rows, layout):
            if table.number not in by_row:
                table.of(values)[local] = 0
        for parts in everyones_rows:
            for table, local, added in parts:
                if table.number not in by_row:
                    table.of(values).index_add_(0, local, added)
        return parcel.answered(values, tail, _merged(everyones_rows, by_row, layout)), state

    def most_bytes(layout: Layout, topology: Topology) -> list[float]:
        header = (topology.workers - 1) * _numbers(layout) * NUMBER_BYTES
        if keeps_rows:
            return [header + (topology.workers - 1) * _all_rows_bytes(layout)] * topology.workers
        return [header + 2 * (topology.workers - 1) / topology.workers * layout.nbytes] * topology.workers

    def legs(layout: Layout, topology: Topology) -> list[Leg]:
        others = topology.workers - 1
        header = Leg("slowest", others * _numbers(layout) * NUMBER_BYTES, others, "AllGather")
        if keeps_rows:
            return [header, Leg("slowest", others * _all_rows_bytes(layout), 1)]
        whole = Leg("slowest", 2 * others / topology.workers * layout.nbytes, 2 * others, "AllReduce")
        return [header, whole]

    return DenseExchange(push, 2, most_bytes, legs, most_bytes=most_bytes, takes_rows=True)


def _all_rows_bytes(layout: Layout) -> int:
    """Of every row, with its number."""
    return sum(table.rows for table in _tables(layout)) * ID_BYTES + layout.nbytes


def _numbers(layout: Layout) -> int:
    """In the header."""
    return OWN_NUMBERS + len(list(_tables(layout))) + layout.tail


def _tables(layout: Layout) -> Iterator[_Table]:
    first = 0
    for number, ((begin, end), shape) in enumerate(zip(layout.spans, layout.shapes, strict=True)):
        if end > begin:
            rows = shape[0] if shape else 1
            yield _Table(number, begin, end, first, rows)
            first += rows


def _touched(parcel: Parcel) -> tuple[Tensor, Tensor]:
    """Numbers of the rows that are listed, or not all zero, through all tensors, and what they hold, flat."""
    values = parcel.values
    ids, rows = [torch.empty(0, dtype=torch.int64, device=values.device)], [values[:0]]
    for table in _tables(parcel.layout):
        if table.number in parcel.rows:
            listed = parcel.rows[table.number]
            ids.append(listed.numbers + table.first_row)
            rows.append(listed.values.flatten())
            continue
        local = touched_rows(table.of(values))
        ids.append(local + table.first_row)
        rows.append(table.of(values)[local].flatten())
    return torch.cat(ids), torch.cat(rows)


def _parts(ids: Tensor, rows: Tensor, layout: Layout) -> Iterator[_Part]:
    """Of every tensor, those among these."""
    begin = 0
    for table in _tables(layout):
        is_here = (ids >= table.first_row) & (ids < table.first_row + table.rows)
        local = ids[is_here] - table.first_row
        width = (table.end - table.begin) // table.rows
        yield _Part(table, local, rows[begin : begin + len(local) * width].view(-1, width))
        begin += len(local) * width


def _merged(everyones: Sequence[Sequence[_Part]], listed: Collection[int], layout: Layout) -> Mapping[int, Rows]:
    """The sum over ranks as rows, of the tensors with these numbers."""
    found = {}
    for parts in zip(*everyones, strict=True):
        table = parts[0].table
        if table.number not in listed:
            continue
        numbers, sums = merge_rows(torch.cat([one.numbers for one in parts]), torch.cat([one.rows for one in parts]))
        found[table.number] = Rows(numbers, sums.view(-1, *layout.shapes[table.number][1:]))
    return found
