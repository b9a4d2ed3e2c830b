"""Look-ahead: what the next batches will look up is asked for early, so that a forward finds its rows there.

Requests are made only right after a round in which every rank said it is idle, so their order is the same everywhere
(design law 8) whatever ranks do in between. Such a moment is a `turn`, when the loop gets a batch. For a batch b:

    turn of b - 3       what the rank will look up in b is worked out, while rows are on their way
    turn of b - 2       counts have come with the round itself; ids leave
    the next round      owners say which of the rows stay put: no rank will touch them in b - 1  (tables that send rows)
    turn of b - 1       those rows leave                                                         (tables that send rows)
    turn of b           all other rows leave; they land while the forward runs
    the next round      owners say which rows of b + 1 rest: no rank reads them in b + 2   (tables that defer gradients)
    turn of b + 1       gradients of b's rows at rest leave, see `deferral.py`             (tables that defer gradients)

What leaves at one moment, of whatever tables, is one message to each rank (`joined.py`): ids, early rows; masks go with
the headers of the round. So are late rows with the ids where they are few; else each table's go by themselves, in the
order in which a forward reads, since it waits for them, and the ids go with the first.

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

from armillary.exchanges.look_up import FORESEEN
from armillary.runtime.hybrid.deferral import Deferral
from armillary.runtime.hybrid.early import MASKED, SENT, Early
from armillary.runtime.hybrid.flight import Flight, advance_together
from armillary.runtime.hybrid.habits import Habits
from armillary.runtime.hybrid.outlook import Outlook
from armillary.runtime.hybrid.table import LookUp, RowTable
from armillary.runtime.transport import Transport

__all__ = ["DEPTH", "LookAhead"]

DEPTH = 3  # batches that are looked at before their turn; ids go one less ahead
FEW_BYTES = 128 << 10  # of the rows one rank expects of a batch: nobody is held up if they travel with others


@dataclass(eq=False)
class Ahead:
    """A batch's expected look-ups, in one order on all ranks."""

    earlies: list[Early] = field(default_factory=list)
    stamp: tuple[int, ...] = ()  # of the tables when the last rows were read
    strayed: set[str] = field(default_factory=set)  # tables that were looked up elsewhere first
    is_closed: bool = False
    has_few: bool = True  # no rank expects more than `FEW_BYTES`

    def of(self, table: RowTable) -> list[Early]:
        return [early for early in self.earlies if early.table is table]


class LookAhead:
    """State of one rank. tables: those of the plan, in launch order; without any that looks ahead, nothing is sent."""

    def __init__(self, tables: Sequence[RowTable], transport: Transport, deferral: Deferral):
        self.tables = [table for table in tables if table.look_ahead != "none"][:FORESEEN][::-1]  # as a forward reads
        self.transport, self.deferral = transport, deferral
        self.habits = Habits()
        self.now = Ahead()  # the batch in the loop's hands
        self.coming: list[Ahead] = []
        self.expected = Outlook(self.tables, transport.place.workers)  # of the batch `DEPTH` after the one at hand
        self.is_told = True  # of what was known at the last turn
        self.begin()
        self.is_running = False

    @property
    def is_on(self) -> bool:
        return bool(self.tables)

    @property
    def outlook(self) -> Tensor | None:
        """(ranks, columns) float64, what this rank tells each in its next rounds; None with no table."""
        return self.expected.said

    def begin(self) -> None:
        """A loop begins: nothing is foreseen yet. Every rank must call it."""
        self._let_go(self.coming)
        self.expected.clear()
        self.upset: set[str] = set()  # tables of which rows moved that had been sent
        self.habits.begin()
        self.is_running = True

    def stop(self) -> None:
        """The loop is left: what was asked for batches that will not come is not waited for."""
        self.is_running = False
        self._let_go(self.coming)
        self.expected.clear()
        self.now.stamp = ()

    def _let_go(self, aheads: Sequence[Ahead]) -> None:
        self.coming = [Ahead() for _ in range(DEPTH - 1)]
        for early in (early for ahead in aheads for early in ahead.earlies):
            if early.flight.wait is not None:
                self.transport.let_go(early.flight.wait)

    def forget(self) -> None:
        """Tables have other owners: the ids that went ahead were meant for the old ones. Their answers are not waited
        for, and the batches they were of are looked up as ever. Every rank must call it."""
        self._let_go([self.now, *self.coming])
        self.now = Ahead()
        self.habits.forget_keys()
        self.expected.deal_anew(self.habits)

    @property
    def made(self) -> int:
        """Bits of the expected look-ups of this batch that this rank has made."""
        return sum(1 << early.bit for early in self.now.earlies if early.is_taken)

    @property
    def moved(self) -> int:
        """Bits of the look-ups of the next batch for which this rank has sent rows that moved since."""
        return sum(1 << early.bit for early in self.coming[0].earlies if early.has_moved)

    def turn(self, moved: Sequence[int], heard: Tensor) -> None:
        """The loop gets another batch.

        Every rank must call it right after an idle round, in which it heard `moved` and the outlook of every rank
        (`heard`: (ranks, columns)), and `close`.
        """
        self.deferral.arrive()
        for early in self.now.earlies:
            early.look_up.resting = None  # it speaks of the batch that comes now
            if early.is_mine:
                self.habits.judge(early.table, early.number, early.is_taken)
        for early in self.coming[0].earlies:
            early.is_void = bool(reduce(or_, moved) >> early.bit & 1)
            self.upset |= {early.table.name} if early.is_void else set()
        last = self._agree(heard.long())
        self.now = self.coming.pop(0)
        self._send_late([early.flight for early in last.earlies])
        self.coming.append(last)
        self.deferral.leave()
        self._send_early()
        self.is_told = False

    def foresee(self, leaves: Sequence[Tensor], last_leaves: Sequence[Tensor]) -> None:
        """The batch that the loop gets has these tensors; the one `DEPTH` after it, where known, has `last_leaves`. The
        rounds to come tell the others what is expected of that one."""
        self.habits.open_batch(leaves)
        self.expected.expect(self.habits, last_leaves)

    def _agree(self, heard: Tensor) -> Ahead:
        """What each rank expects of the last batch that is known."""
        masks, nbytes, *counts = heard.t().tolist()
        ahead = Ahead(has_few=max(nbytes) <= FEW_BYTES)
        wanted = reduce(or_, masks)
        for bit in range(wanted.bit_length()):
            if wanted >> bit & 1:
                planned = tuple(bool(mask >> bit & 1) for mask in masks)
                ahead.earlies.append(self._early(bit, tuple(counts[bit]), planned))
        return ahead

    def _early(self, bit: int, served: tuple[int, ...], planned: tuple[bool, ...]) -> Early:
        table, number = self.tables[bit // self.expected.each], bit % self.expected.each
        keys = self.expected.wanted.get(bit)
        if keys is None:
            keys = torch.empty(0, dtype=torch.int64, device=table.shard.device)
        asked, before = tuple(table.ownership.counts(keys)), self.coming[-1].of(table)
        under_way = self.coming[-2].of(table) if self.deferral.defers(table) else []
        may_send = table.name not in self.upset
        return Early(table, number, bit, keys, asked, served, planned, before, under_way, may_send)

    def masks(self) -> list[Flight]:
        """What the next round takes along, once: of the last batch whose ids have left, which rows stay put; of the one
        before, which rest."""
        masks = self._going(self.coming[-1], MASKED)
        if not self.is_told:
            self.is_told = True
            masks += self._tell(*self.coming[-2:])
        return masks

    def _tell(self, ahead: Ahead, after: Ahead) -> list[Flight]:
        """Of every look-up of a batch, which of its rows the one after does not read."""
        telling = []
        for early in ahead.earlies:
            if self.deferral.defers(early.table) and (readers := after.of(early.table)):
                early.look_up.resting = Flight(early.tell(readers), early.table.name, 0)
                telling.append(early.look_up.resting)
        return telling

    def _send_late(self, beginning: Sequence[Flight]) -> None:
        """Of the batch at hand all rows that have not been sent, and with them the ids of the one that was agreed on.
        Every request that a look-up needs has been made then; it has only to wait for the last."""
        while late := [early.flight for early in self.now.earlies if early.flight.left > 0]:
            together = [late] if self.now.has_few else [[flight] for flight in late]
            for flights in together:
                advance_together([*flights, *beginning], self.transport)
                beginning = ()
        advance_together(beginning, self.transport)
        for early in self.now.earlies:
            early.before = early.under_way = ()
            early.table.pending.append(early.look_up)
        self.now.stamp = self._stamp()

    def _send_early(self) -> None:
        """Of the next batch the rows that stay put."""
        advance_together(self._going(self.coming[0], SENT), self.transport)
        for table in self.tables:
            table.forget_moves()

    def _going(self, ahead: Ahead, left: int) -> list[Flight]:
        """Look-ups whose rows go early, of those that have more than `left` requests to make."""
        return [early.flight for early in ahead.earlies if early.goes_early and early.flight.left > left]

    def _stamp(self) -> tuple[int, ...]:
        """Changes when a step or a load has moved rows."""
        return (self.transport.step, *(table.shard._version for table in self.tables))

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
                early.look_up.resting = None
                early.look_up.ticket = self.transport.complete(early.ticket_of(has_come), table.name).ticket
