"""Prefetch: what the next batches will look up is asked for beforehand, so that a forward finds its rows there.

Requests are made only right after a round in which every rank said it is idle, so their order is the same everywhere
(design law 8). Such a moment is when the loop gets a batch. For a batch b:

    b - 3 begins      what the rank will look up in b is predicted, while rows are on their way
    b - 2 begins      counts have come with the round itself; ids leave
    the next round    owners say which of the rows are unchanged: no rank touches them in b - 1  (tables that send rows)
    b - 1 begins      those rows leave                                                           (tables that send rows)
    b begins          all other rows leave; they arrive while the forward runs
    the next round    owners say which rows of b + 1 are unused in b + 2                 (tables that delay gradients)
    b + 1 begins      gradients of b's rows that are unused now leave, `delayed_gradients` (tables that delay gradients)

What leaves at one moment, of whatever tables, is one message to each rank (`transport/requests.py`). Masks go with the
headers of the round. Late rows go with the ids where they are few; else each table's go by themselves, in the order in
which a forward reads.

A look-up that finds its rows here costs no round. The next idle round says which were found (`seal`), since only their
gradients may be pushed. One that some ranks predicted in vain is asked for anew. Nothing depends on a prediction being
right: a look-up that was not predicted is made as ever (`tables/lookups.py`). Rows that moved after they were sent are
sent again, and the table sends none before the step any more.

Bitwise equality with no prefetch rests on this: a row is read after the last step that moves it and before the next,
and gradients of one rank and table stand in the order of the program. So rows are used only while neither a step nor a
load has moved the table, and only if no look-up of their table was made elsewhere before in this batch.

Source: the idea is BagPipe's (Agarwal et al., SOSP 2023) and EmbRace's (Li et al., ICPP 2022).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.exchange import Counts, Pulled, Staying
from armillary.exchanges.look_up import BITS, FIRST_COUNT, MADE, MOVED, PREDICTED, announcement_columns, most_of_each
from armillary.plans.group import PrefetchKind
from armillary.plans.requests import AllToAll, Program
from armillary.prefetch.predictor import LookupPredictor
from armillary.tables.lookups import Delay, PiggybackColumns, Unused
from armillary.tables.table import LookUp, RowTable
from armillary.transport.in_flight import InFlight, start_coalesced
from armillary.transport.transport import Transport

__all__ = ["DEPTH", "MASKED", "SENT", "Announcement", "PrefetchedLookup", "Prefetcher", "RowMoves"]


class Announcement:
    """Of one rank. tables: those that prefetch, in the order in which a forward reads them.

    wanted: sorted distinct keys of the look-ups it predicts, by bit (see `exchanges/look_up.py`).
    columns: (ranks, n) float64, what rides on the headers to each rank in the rounds to come.
    """

    def __init__(self, tables: Sequence[RowTable], workers: int):
        self.tables = list(tables)
        self.each = most_of_each(len(self.tables))
        self.shape = (workers, announcement_columns(len(self.tables)))
        self.clear()

    def clear(self) -> None:
        """Nothing is predicted."""
        self.wanted: dict[int, Tensor] = {}
        self.columns = torch.zeros(self.shape, dtype=torch.float64)

    def predict(self, predictor: LookupPredictor, leaves: Sequence[Tensor]) -> None:
        """A batch with these tensors is predicted to be looked up as those before it were; no tensors: nothing is."""
        self.clear()
        ranks, columns = self.shape
        nothing, nbytes = [0] * ranks, 0
        counts = [nothing] * (columns - FIRST_COUNT)
        for index, table in enumerate(self.tables):
            for bit, keys in enumerate(predictor.predict(table, leaves, self.each), index * self.each):
                self.wanted[bit], counts[bit] = keys, table.ownership.counts(keys)
                nbytes += keys.numel() * table.row_bytes
        bits = sum(1 << bit for bit in self.wanted)
        told = zip(nothing, nothing, [bits] * ranks, [nbytes] * ranks, *counts, strict=True)
        self.columns = torch.tensor(list(told), dtype=torch.float64)


class RowMoves:
    """Of one table's shard. It listens to what is written by row (`RowTable.on_written`); any other write to the shard
    may have moved all rows."""

    def __init__(self, table: RowTable):
        self.table = table
        self.forget()
        table.on_written = lambda _, rows, before: self._written(rows, before)

    def forget(self) -> None:
        """Nothing has moved."""
        self.moved, self.version = torch.empty(0, dtype=torch.int64), self.table.shard._version

    def _written(self, rows: Tensor | None, before: int) -> None:
        """rows: local ones that moved; None: values were swapped, and will be back before anybody reads them."""
        shard = self.table.shard
        if before == self.version:  # nothing else has written to it
            self.version = shard._version
        if rows is not None:
            self.moved = torch.cat([self.moved.to(rows), rows]).unique()

    def have_moved(self, rows: Tensor) -> bool:
        """Whether any of these local rows has, since `forget`."""
        shard = self.table.shard
        if not len(rows) or (shard._version == self.version and not len(self.moved)):
            return False
        return shard._version != self.version or bool(torch.isin(rows, self.moved).any())


# Requests of `pull_early` still to be made, once ...
MASKED = 2  # ... it is told which rows are unchanged
SENT = 1  # ... those have been sent


@dataclass(eq=False)
class PrefetchedLookup:
    """A look-up of table rows. `before` are those that were predicted of the same table in the batch before.

    Args of note:
        number, bit: its place among the predicted look-ups of its table, and of all.
        keys: sorted distinct, none where this rank only serves. asked, served: rows of and for every rank.
        planned: by rank, whether it predicts to make it.
        under_way: as `before`, of the batch before that one, of which gradients may arrive late.
        moves: of the rows of its table, if unchanged rows are sent before a step; None: all are sent after it.
        may_send: whether rows of the table may still be sent before a step.
    """

    table: RowTable
    number: int
    bit: int
    keys: Tensor
    asked: Counts
    served: Counts
    planned: tuple[bool, ...]
    before: Sequence["PrefetchedLookup"]
    under_way: Sequence["PrefetchedLookup"]
    moves: RowMoves | None
    may_send: bool
    look_up: LookUp = field(default_factory=lambda: LookUp(None, None))
    pulled: Pulled | None = None
    is_taken: bool = False
    is_void: bool = False  # rows sent before the step have moved after all
    wanted: Tensor | None = None  # local rows that are asked of this rank
    sent: Tensor | None = None  # those that were sent before the step
    unused: InFlight | None = None  # brings which of its rows no rank reads in the next batch

    def __post_init__(self) -> None:
        table = self.table
        where = (self.keys, self.asked, self.served, table.shard, table.ownership, table.place)
        if self.goes_early:
            assert table.exchange.pull_early is not None
            staying = Staying(self._unchanged, lambda: self.is_void)
            self.flight = InFlight(table.exchange.pull_early(*where, staying), table.name, 3)
        else:
            self.flight = InFlight(table.exchange.pull(*where), table.name, table.exchange.pull_requests - 1)

    @property
    def goes_early(self) -> bool:
        return self.moves is not None

    @property
    def is_mine(self) -> bool:
        return self.planned[self.table.place.rank]

    def _unchanged(self, rows: Tensor) -> Tensor:
        """Of these local rows, those that no rank is predicted to touch in the batch before, and whose gradients are
        not under way then."""
        self.wanted = rows
        known = [one.wanted for one in self.before if all(one.planned) and one.wanted is not None]
        if not self.may_send or not known or len(known) < len(self.before):
            unchanged = torch.zeros_like(rows, dtype=torch.bool)
        else:
            late = [one.wanted for one in self.under_way if one.wanted is not None]
            unchanged = torch.isin(rows, torch.cat([*known, *late]), invert=True)
        self.sent = rows[unchanged]
        return unchanged

    def tell(self, after: Sequence["PrefetchedLookup"]) -> Program[Unused]:
        """Owners tell which of the rows are unused next: not read by these look-ups, all of the next batch."""
        assert self.wanted is not None
        read = torch.cat([one.wanted for one in after if one.wanted is not None])
        served = torch.isin(self.wanted, read, invert=True)
        asked = yield AllToAll(served.to(torch.uint8), self.served, self.asked)
        return Unused(served, asked.bool())

    @property
    def has_moved(self) -> bool:
        return self.moves is not None and self.sent is not None and self.moves.have_moved(self.sent)

    def finish(self, transport: Transport) -> Pulled:
        if self.pulled is None:
            self.pulled, self.flight.result = self.flight.finish(transport), None
        return self.pulled

    def route_of(self, has_come: Sequence[bool]) -> Program[Pulled]:
        """A pull by those ranks alone that made the look-up; the rows that come with it are theirs already."""
        asks, table = has_come[self.table.place.rank], self.table
        keys, asked = (self.keys, self.asked) if asks else (self.keys[:0], (0,) * len(has_come))
        served = tuple(count if come else 0 for count, come in zip(self.served, has_come, strict=True))
        return table.exchange.pull(keys, asked, served, table.shard, table.ownership, table.place)


DEPTH = 3  # batches that are looked at before they begin; ids go one less ahead
FEW_BYTES = 128 << 10  # of the rows one rank predicts of a batch: nobody is held up if they travel with others


@dataclass(eq=False)
class BatchLookups:
    """A batch's predicted look-ups, in one order on all ranks."""

    look_ups: list[PrefetchedLookup] = field(default_factory=list)
    stamp: tuple[int, ...] = ()  # of the tables when the last rows were read
    strayed: set[str] = field(default_factory=set)  # tables that were looked up elsewhere first
    is_closed: bool = False
    has_few: bool = True  # no rank predicts more than `FEW_BYTES`

    def of(self, table: RowTable) -> list[PrefetchedLookup]:
        return [one for one in self.look_ups if one.table is table]


class Prefetcher:
    """State of one rank; what `Prefetch` says of each method holds here.

    Args:
        tables: those of the plan that are pulled, in launch order.
        kinds: how each of them prefetches, by name; those it does not name do not.
        delay: of gradients.
    """

    depth = DEPTH

    def __init__(
        self, tables: Sequence[RowTable], kinds: Mapping[str, PrefetchKind], transport: Transport, delay: Delay
    ):
        named = [table for table in tables if kinds.get(table.name, "none") != "none"]
        self.tables = named[:PREDICTED][::-1]  # as a forward reads
        self.names = {table.name for table in self.tables}
        self.moves = {t.name: RowMoves(t) for t in self.tables if kinds[t.name] in ("rows", "gradients")}
        self.transport, self.delay = transport, delay
        self.predictor = LookupPredictor()
        self.now = BatchLookups()  # the batch in the loop's hands
        self.coming: list[BatchLookups] = []
        self.announcement = Announcement(self.tables, transport.place.workers)  # of the batch `DEPTH` after it
        self.heard = torch.zeros(self.announcement.shape, dtype=torch.float64)  # of every rank, in the last round
        self.is_told = True  # of what was known when this batch began
        self.begin_loop()
        self._run(False)

    def begin_loop(self) -> None:
        self._let_go(self.coming)
        self.announcement.clear()
        self.upset: set[str] = set()  # tables of which rows moved that had been sent
        self.predictor.begin()
        self._run(True)

    def _run(self, is_running: bool) -> None:
        self.is_running = is_running
        self.transport.pairwise.keeps_order = is_running  # what this batch needs arrives before what the next one does

    def end_loop(self) -> None:
        self._run(False)
        self._let_go(self.coming)
        self.announcement.clear()
        self.now.stamp = ()

    def _let_go(self, batches: Sequence[BatchLookups]) -> None:
        self.coming = [BatchLookups() for _ in range(DEPTH - 1)]
        for one in (one for batch in batches for one in batch.look_ups):
            if one.flight.wait is not None:
                self.transport.let_go(one.flight.wait)

    def piggyback(self, is_idle: bool) -> PiggybackColumns:
        columns = self.announcement.columns
        if is_idle:
            columns[:, MADE] = sum(1 << one.bit for one in self.now.look_ups if one.is_taken)
            columns[:, MOVED] = sum(1 << one.bit for one in self.coming[0].look_ups if one.has_moved)
        return PiggybackColumns(columns, self._masks())

    def receive_columns(self, columns: Tensor, read_at: Sequence[float]) -> None:
        self.heard = columns
        if read_at:
            self.delay.see_reads(read_at)

    def begin_batch(self, batch: Callable[[], Sequence[Tensor]], last: Callable[[], Sequence[Tensor]]) -> None:
        self.delay.arrive()
        for one in self.now.look_ups:
            one.unused = None  # it speaks of the batch that comes now
            if one.is_mine:
                self.predictor.judge(one.table, one.number, one.is_taken)
        heard = self.heard.long()
        moved = reduce(or_, heard[:, MOVED].tolist())
        for one in self.coming[0].look_ups:
            one.is_void = bool(moved >> one.bit & 1)
            self.upset |= {one.table.name} if one.is_void else set()
        new = self._agree(heard[:, BITS:])
        self.now = self.coming.pop(0)
        self._send_late([one.flight for one in new.look_ups])
        self.coming.append(new)
        self.delay.leave()
        self._send_early()
        self.is_told = False
        self.predictor.open_batch(batch())
        self.announcement.predict(self.predictor, last())

    def _agree(self, heard: Tensor) -> BatchLookups:
        """What each rank predicts of the last batch that is known."""
        masks, nbytes, *counts = heard.t().tolist()
        batch = BatchLookups(has_few=max(nbytes) <= FEW_BYTES)
        wanted = reduce(or_, masks)
        for bit in range(wanted.bit_length()):
            if wanted >> bit & 1:
                planned = tuple(bool(mask >> bit & 1) for mask in masks)
                batch.look_ups.append(self._prefetched(bit, tuple(counts[bit]), planned))
        return batch

    def _prefetched(self, bit: int, served: tuple[int, ...], planned: tuple[bool, ...]) -> PrefetchedLookup:
        table, number = self.tables[bit // self.announcement.each], bit % self.announcement.each
        keys = self.announcement.wanted.get(bit)
        if keys is None:
            keys = torch.empty(0, dtype=torch.int64, device=table.shard.device)
        asked, before = tuple(table.ownership.counts(keys)), self.coming[-1].of(table)
        under_way = self.coming[-2].of(table) if self.delay.delays(table) else []
        moves, may_send = self.moves.get(table.name), table.name not in self.upset
        return PrefetchedLookup(table, number, bit, keys, asked, served, planned, before, under_way, moves, may_send)

    def _masks(self) -> list[InFlight]:
        """What the next round takes along, once: of the last batch whose ids have left, which rows are unchanged; of
        the one before, which are unused next."""
        masks = self._going(self.coming[-1], MASKED)
        if not self.is_told:
            self.is_told = True
            masks += self._tell(*self.coming[-2:])
        return masks

    def _tell(self, batch: BatchLookups, after: BatchLookups) -> list[InFlight]:
        """Of every look-up of a batch, which of its rows the one after does not read."""
        telling = []
        for one in batch.look_ups:
            if self.delay.delays(one.table) and (readers := after.of(one.table)):
                one.unused = InFlight(one.tell(readers), one.table.name, 0)
                telling.append(one.unused)
        return telling

    def _send_late(self, beginning: Sequence[InFlight]) -> None:
        """Of the batch at hand all rows that have not been sent, and with them the ids of the one that was agreed on.
        Every request that a look-up needs has been made then; it has only to wait for the last."""
        while late := [one.flight for one in self.now.look_ups if one.flight.left > 0]:
            together = [late] if self.now.has_few else [[flight] for flight in late]
            for flights in together:
                start_coalesced([*flights, *beginning], self.transport)
                beginning = ()
        start_coalesced(beginning, self.transport)
        for one in self.now.look_ups:
            one.before = one.under_way = ()
            one.table.pending.append(one.look_up)
        self.now.stamp = self._stamp()

    def _send_early(self) -> None:
        """Of the next batch the rows that are unchanged."""
        start_coalesced(self._going(self.coming[0], SENT), self.transport)
        for moves in self.moves.values():
            moves.forget()

    def _going(self, batch: BatchLookups, left: int) -> list[InFlight]:
        """Look-ups whose rows go early, of those that have more than `left` requests to make."""
        return [one.flight for one in batch.look_ups if one.goes_early and one.flight.left > left]

    def _stamp(self) -> tuple[int, ...]:
        """Changes when a step or a load has moved rows."""
        return (self.transport.step, *(table.shard._version for table in self.tables))

    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        if table.name not in self.names or not self.is_running or self.now.is_closed:
            return None
        found = self._find(table, keys)
        self.predictor.notice(table, keys, found is not None)
        if found is None:
            self.now.strayed.add(table.name)
            return None
        found.is_taken = True
        pulled = found.finish(self.transport)
        found.look_up.rows, found.pulled = pulled.rows, pulled._replace(rows=keys[:0])
        return found.look_up

    def _find(self, table: RowTable, keys: Tensor) -> PrefetchedLookup | None:
        if table.name in self.now.strayed or self.now.stamp != self._stamp():
            return None
        mine = [one for one in self.now.of(table) if one.is_mine]
        last = max((one.number for one in mine if one.is_taken), default=-1)
        return next((one for one in mine if one.number > last and torch.equal(one.keys, keys)), None)

    def seal(self) -> None:
        if self.now.is_closed:
            return
        self.now.is_closed = True
        made = self.heard[:, MADE].long().tolist()
        for one in self.now.look_ups:
            route, has_come = one.finish(self.transport).route, tuple(bool(mask >> one.bit & 1) for mask in made)
            one.pulled = None
            table = one.table
            if not any(has_come):
                table.pending = [look_up for look_up in table.pending if look_up is not one.look_up]
            elif has_come == one.planned:
                one.look_up.route = route
            else:
                one.unused = None
                one.look_up.route = self.transport.complete(one.route_of(has_come), table.name).route

    def hold(
        self, table: RowTable, look_ups: Sequence[LookUp], gradients: list[Tensor], routes: list[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        telling = {one.look_up: one.unused for one in self.now.of(table) if one.unused is not None}
        unused = [telling[one].finish(self.transport) if one in telling else None for one in look_ups]
        return self.delay.split(table, gradients, routes, unused)
