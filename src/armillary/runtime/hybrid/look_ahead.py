"""Look-ahead: what the next batches will look up is asked for early, so that a forward finds its rows there.

Requests are made only right after a round in which every rank said it is idle, so their order is the same everywhere
(design law 8) whatever ranks do in between. For a batch b there are four such moments, three of them a `turn`, when the
loop asks for a batch:

    turn of b - 2       counts and ids leave
    backward of b - 2   owners say which of the rows stay put: no rank will touch them in b - 1  (tables that send rows)
    turn of b - 1       those rows leave                                                         (tables that send rows)
    turn of b           all other rows leave; they land while the forward runs

A look-up that finds its rows here costs no round. The next idle round says which were found (`close`), since only
their gradients may be pushed; one that some ranks expected in vain is asked for anew by those that made it. Nothing
depends on an expectation being right: a look-up that was not expected is made as ever (`look_ups.py`); rows that moved
after they were sent, because of such a look-up, are sent again, and the table sends none before the step any more.

Bitwise equality with no look-ahead rests on this: a row is read after the last step that moves it and before the next,
and gradients of one rank and table stand in the order of the program. So rows are used only while neither a step nor a
load has moved the table, and a look-up is served from here only if none of its table was made elsewhere before it in
this batch.

Source: the idea is BagPipe's (Agarwal et al., SOSP 2023) and EmbRace's (Li et al., ICPP 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from armillary.exchanges.look_up import FORESEEN, foreseen_of_each
from armillary.facts.collectives import AllToAll
from armillary.runtime.hybrid.early import MASKED, SENT, Early
from armillary.runtime.hybrid.habits import Habits
from armillary.runtime.hybrid.table import LookUp, RowTable
from armillary.runtime.transport import Transport, Wait

__all__ = ["DEPTH", "LookAhead"]

DEPTH = 2  # batches that ids go ahead


@dataclass(eq=False)
class Ahead:
    """A batch's expected look-ups, in one order on all ranks."""

    earlies: list[Early] = field(default_factory=list)
    stamp: tuple[int, ...] = ()  # of the tables when the last rows were read
    strayed: set[str] = field(default_factory=set)  # tables that were looked up elsewhere first
    is_closed: bool = False

    def of(self, table: RowTable) -> list[Early]:
        return [early for early in self.earlies if early.table is table]


class LookAhead:
    """State of one rank. tables: those of the plan, in launch order; without any that looks ahead, nothing is sent."""

    def __init__(self, tables: Sequence[RowTable], transport: Transport):
        self.tables = [table for table in tables if table.look_ahead != "none"][:FORESEEN][::-1]  # as a forward reads
        self.transport = transport
        self.each = foreseen_of_each(len(self.tables))
        self.habits = Habits()
        self.now = Ahead()  # the batch in the loop's hands
        self.begin()
        self.is_running = False

    @property
    def is_on(self) -> bool:
        return bool(self.tables)

    def begin(self) -> None:
        """A loop begins: nothing is foreseen yet. Every rank must call it."""
        self.coming = [Ahead() for _ in range(DEPTH)]
        self.upset: set[str] = set()  # tables of which rows moved that had been sent
        self.habits.begin()
        self.is_running = True

    def stop(self) -> None:
        """The loop is left: what was asked for batches that will not come is not waited for."""
        self.is_running = False
        self.coming = [Ahead() for _ in range(DEPTH)]
        self.now.stamp = ()

    def forget(self) -> None:
        """Tables have other owners: the ids that went ahead were meant for the old ones. Their answers are not waited
        for, and the batches they were of are looked up as ever. Every rank must call it."""
        self.now, self.coming = Ahead(), [Ahead() for _ in range(DEPTH)]
        self.habits.forget_keys()

    @property
    def made(self) -> int:
        """Bits of the expected look-ups of this batch that this rank has made."""
        return sum(1 << early.bit for early in self.now.earlies if early.is_taken)

    @property
    def moved(self) -> int:
        """Bits of the look-ups of the next batch for which this rank has sent rows that moved since."""
        return sum(1 << early.bit for early in self.coming[0].earlies if early.has_moved)

    @torch.no_grad()
    def turn(self, leaves: Sequence[Tensor], last_leaves: Sequence[Tensor], moved: Sequence[int]) -> None:
        """The loop gets the batch with these tensors; the one `DEPTH` after it, where known, has `last_leaves`.

        Every rank must call it right after an idle round, in which it heard `moved` of every rank, and `close`.
        """
        for early in self.now.earlies:
            if early.is_mine:
                self.habits.judge(early.table, early.number, early.is_taken)
        self.habits.open_batch(leaves)
        for early in self.coming[0].earlies:
            early.is_void = bool(reduce(or_, moved) >> early.bit & 1)
            self.upset |= {early.table.name} if early.is_void else set()
        wanted, heard = self._announce(last_leaves)
        self.now = self.coming.pop(0)
        self._send_late()  # what the forward waits for travels while the counts are still on their way
        self.coming.append(self._agree(wanted, heard()))
        self._send_early()

    def _announce(self, leaves: Sequence[Tensor]) -> tuple[dict[int, Tensor], Wait]:
        """Sends the counts of what is expected of a batch. Returns its keys by bit, and the wait for the others'."""
        workers = self.transport.place.workers
        counts = torch.zeros(workers, 1 + len(self.tables) * self.each, dtype=torch.int64)
        wanted: dict[int, Tensor] = {}
        for index, table in enumerate(self.tables):
            for bit, keys in enumerate(self.habits.expect(table, leaves, self.each), index * self.each):
                wanted[bit] = keys
                counts[:, 1 + bit] = torch.tensor(table.ownership.counts(keys))
        counts[:, 0] = sum(1 << bit for bit in wanted)
        ones = (1,) * workers
        return wanted, self.transport.start(AllToAll(counts, ones, ones), "look-ahead")

    def _agree(self, wanted: dict[int, Tensor], heard: Tensor) -> Ahead:
        """Every rank knows what the others expect; the ids leave."""
        masks = heard[:, 0].tolist()
        ahead = Ahead()
        for bit in range(len(self.tables) * self.each):
            planned = tuple(bool(mask >> bit & 1) for mask in masks)
            if any(planned):
                ahead.earlies.append(self._early(bit, wanted.get(bit), tuple(heard[:, 1 + bit].tolist()), planned))
        for early in ahead.earlies:
            early.flight.resume(self.transport, None)
        return ahead

    def _early(self, bit: int, keys: Tensor | None, served: tuple[int, ...], planned: tuple[bool, ...]) -> Early:
        table = self.tables[bit // self.each]
        if keys is None:
            keys = torch.empty(0, dtype=torch.int64, device=table.shard.device)
        asked, before = tuple(table.ownership.counts(keys)), self.coming[-1].of(table)
        may_send = table.name not in self.upset
        return Early(table, bit % self.each, bit, keys, asked, served, planned, before, may_send)

    @torch.no_grad()
    def send_masks(self) -> None:
        """Right after an idle round; does nothing where it has been done."""
        self._advance(self.coming[-1], MASKED)

    def _send_late(self) -> None:
        """Of the batch at hand all rows that have not been sent. Every request that a look-up needs has been made then;
        it has only to wait for the last."""
        while any(early.flight.left for early in self.now.earlies):
            for early in self.now.earlies:
                early.advance(self.transport, 0)
        for early in self.now.earlies:
            early.before = ()
            early.table.pending.append(early.look_up)
        self.now.stamp = self._stamp()

    def _send_early(self) -> None:
        """Of the next batch the rows that stay put."""
        self._advance(self.coming[0], MASKED)  # there was no backward since its ids left
        self._advance(self.coming[0], SENT)
        for table in self.tables:
            table.forget_moves()

    def _advance(self, ahead: Ahead, left: int) -> None:
        for early in ahead.earlies:
            if early.goes_early:
                early.advance(self.transport, left)

    def _stamp(self) -> tuple[int, ...]:
        """Changes when a step or a load has moved rows."""
        return (self.transport.step, *(table.shard._version for table in self.tables))

    @torch.no_grad()
    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        """The look-up of these sorted distinct keys, if it was foreseen and its rows have not moved; None where it must
        be made as ever. Asks nothing of anyone."""
        if table.look_ahead == "none" or not self.is_running or self.now.is_closed:
            return None
        found = self._find(table, keys)
        self.habits.notice(table, keys, found is not None)
        if found is None:
            self.now.strayed.add(table.name)
            return None
        found.is_taken = True
        pulled = found.land(self.transport)
        found.look_up.rows, found.pulled = pulled.rows, pulled._replace(rows=keys[:0])
        return found.look_up

    def _find(self, table: RowTable, keys: Tensor) -> Early | None:
        if table.name in self.now.strayed or self.now.stamp != self._stamp():
            return None
        mine = [early for early in self.now.of(table) if early.is_mine]
        last = max((early.number for early in mine if early.is_taken), default=-1)
        return next((early for early in mine if early.number > last and torch.equal(early.keys, keys)), None)

    @torch.no_grad()
    def close(self, made: Sequence[int]) -> None:
        """Settles what this batch's look-ups have to push; `made`: what every rank said in the idle round before."""
        if self.now.is_closed:
            return
        self.now.is_closed = True
        for early in self.now.earlies:
            ticket, has_come = early.land(self.transport).ticket, tuple(bool(mask >> early.bit & 1) for mask in made)
            early.pulled = None
            table = early.table
            if not any(has_come):
                table.pending = [look_up for look_up in table.pending if look_up is not early.look_up]
            elif has_come == early.planned:
                early.look_up.ticket = ticket
            else:
                early.look_up.ticket = self.transport.complete(early.ticket_of(has_come), table.name).ticket
