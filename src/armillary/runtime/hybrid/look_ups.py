"""Answers every read of a row-sharded table, this rank's own and the other ranks'.

A read repeats rounds (`exchanges/look_up.py`) until its table was served; a rank that has no read to make serves the
others until all are idle. The rows a read brings are a leaf of the autograd graph, so their gradient arrives merged:
torch's own backward of the gather adds up duplicates, in any mode of any of the row-gather operations.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.exchanges.exchange import Pulled
from armillary.exchanges.look_up import FIELDS, FLAGS, LookupRequest, LookupRound, State, look_up
from armillary.facts.collectives import gathered
from armillary.runtime.hybrid.in_flight import InFlight, start_coalesced
from armillary.runtime.hybrid.prefetch import Prefetch
from armillary.runtime.hybrid.table import LookUp, RowTable
from armillary.runtime.transport import Transport
from armillary.runtime.when_final import when_final

__all__ = ["LookUps"]


class LookUps:
    """on_gradient(table): called when a look-up's rows have their gradient (inside backward)."""

    def __init__(
        self,
        tables: Sequence[RowTable],
        transport: Transport,
        on_gradient: Callable[[RowTable], None],
        prefetch: Prefetch,
    ):
        self.tables = list(tables)
        self.pulled = [table for table in tables if table.is_pulled]
        self.served = [table.as_served() for table in self.pulled]
        self.prefetch = prefetch
        self.transport = transport
        self.on_gradient = on_gradient
        self.weights: tuple[float, ...] = (1.0,) * transport.place.workers
        self.words: tuple[int, ...] = ()  # of every rank, as the last round told them
        self.learned: list[RowTable] = []  # tables that any rank's backward brings a gradient
        self.is_phantom = False  # this rank's data have run out: what it reads is not learned from

    def read(self, table: RowTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (any shape) -> distinct rows (u, *row shape), a leaf; and for each id its place among them.

        Raises:
            IndexError: an id outside the table. RuntimeError: a read inside a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{table.name}: read inside a backward (activation checkpointing recomputes it?); keep the look-up of "
                "a row-sharded table outside the checkpointed part"
            )
        with self.transport.within("look-up", table.name):
            return self._read(table, ids)

    def _read(self, table: RowTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        self._refuse_out_of_range(table, ids)
        keys, inverse = torch.unique(table.ownership.keys(ids.long()), return_inverse=True)
        learns = torch.is_grad_enabled() and table.requires_grad
        needs_gradient = learns and not self.is_phantom
        waiting = self.prefetch.take(table, keys) if needs_gradient else None
        if waiting is None:
            with torch.no_grad():
                rows = self._fetch(table, keys, needs_gradient)
            waiting = table.pending[-1] if needs_gradient else None
        if waiting is not None:
            rows = self._await_gradient(table, waiting)
        elif learns:  # the backward runs as everywhere, but its gradient stays here
            place = self.tables.index(table)
            when_final(rows.requires_grad_(), self, lambda here, _: here.on_gradient(here.tables[place]))
        return rows, inverse

    def _fetch(self, table: RowTable, keys: Tensor, needs_gradient: bool) -> Tensor:
        if table.is_pulled:
            return self._pull(table, keys, needs_gradient)
        pulled = self._read_copy(table, keys)
        if needs_gradient:
            table.pending.append(LookUp(pulled.rows, pulled.route))
        return pulled.rows

    def _refuse_out_of_range(self, table: RowTable, ids: Tensor) -> None:
        if not ids.numel():
            return
        least, most = torch.aminmax(ids)
        low, high = int(least), int(most)
        if low < 0 or high >= table.shape[0]:
            raise IndexError(
                f"rank {table.place.rank}: {table.name} has {table.shape[0]} rows, but the batch reads row "
                f"{low if low < 0 else high}; check the vocabulary or the hashing of ids"
            )

    def _read_copy(self, table: RowTable, keys: Tensor) -> Pulled:
        """A table that every rank holds whole: nothing is asked of anyone."""
        none = (0,) * table.place.workers
        program = table.exchange.pull(keys, none, none, table.shard, table.ownership, table.place)
        pulled: Pulled = self.transport.complete(program, table.name)
        return pulled

    def forget_unlearned(self, table: RowTable) -> None:
        """What did not reach the loss on any rank leaves no gradient, not even zero: the optimizer would move rows by
        momentum or decay that in one process stay put."""
        if table.is_pulled:  # both sides remember a look-up, so all of a table's are pushed or none
            table.forget([] if table in self.learned else table.pending)
        else:
            table.forget([look_up for look_up in table.pending if not look_up.has_gradient])

    def join_unread(self, table: RowTable) -> None:
        """This rank did not read the table: it joins the push with no rows, for those that did."""
        if not table.is_pulled and not table.pending:
            keys = torch.empty(0, dtype=torch.int64, device=table.shard.device)
            table.pending.append(LookUp(None, self._read_copy(table, keys).route))

    def _pull(self, table: RowTable, keys: Tensor, needs_gradient: bool) -> Tensor:
        request = LookupRequest(self.pulled.index(table), keys, needs_gradient, self.transport.step)
        while True:
            outcome = self._round(request)
            if outcome.mine:
                assert outcome.pulled is not None
                rows: Tensor = outcome.pulled.rows
                return rows

    def _round(self, request: LookupRequest) -> LookupRound:
        rider = self.prefetch.ride(isinstance(request.table, str))
        program = look_up(request._replace(extra=rider.columns), self.served, self.transport.place)
        opening = InFlight(program, "look-ups", 0)
        start_coalesced([opening, *rider.flights], self.transport)
        assert opening.wait is not None
        headers = opening.wait()
        wanted = [int(code) for code in headers[:, 0].tolist() if code > 0]
        self.prefetch.hear(headers[:, FIELDS:])
        label = self.pulled[min(wanted) - 1].name if wanted else "look-ups"
        outcome: LookupRound = self.transport.complete(program, label, headers)
        self._remember(outcome, request)
        return outcome

    def _remember(self, outcome: LookupRound, request: LookupRequest) -> None:
        """Every rank keeps the route of every look-up whose gradients will come back, in the same order."""
        if outcome.table is None or outcome.pulled is None or not outcome.needs_gradient:
            return
        rows = outcome.pulled.rows if outcome.mine and request.needs_gradient else None
        self.pulled[outcome.table].pending.append(LookUp(rows, outcome.pulled.route))

    def _await_gradient(self, table: RowTable, waiting: LookUp) -> Tensor:
        rows = waiting.rows
        assert rows is not None
        place, known = self.tables.index(table), weakref.ref(waiting)  # both hold the rows, see `when_final.py`
        when_final(rows.requires_grad_(), self, lambda here, _: here._arrived(here.tables[place], known()))
        return rows

    def _arrived(self, table: RowTable, waiting: LookUp | None) -> None:
        """Rows have their gradient, of a look-up that waits for it if it is still there."""
        if waiting is None or waiting.is_pushed:
            raise RuntimeError(
                f"rank {table.place.rank}: {table.name}: rows read before an earlier backward got a gradient after it, "
                "when theirs had left; run each forward right before its backward, or add the losses and run one "
                "backward (torch.utils.checkpoint: use_reentrant=False)"
            )
        waiting.has_gradient = True
        self.on_gradient(table)

    def meet_in_backward(self, weight: float, word: int) -> None:
        """Every rank is in its backward: no rank will look up for it any more. word: that all are told."""
        self.serve_until("idle", weight, word)
        self.prefetch.seal()

    def everyones(self, table: RowTable, part: Tensor) -> Tensor:
        """Collective: what every rank has computed of its rows, (ranks, *part.shape), on the CPU."""
        with self.transport.within("value", table.name), self.transport.unrecorded():
            self.serve_until("asking")
            told: Tensor = self.transport.complete(gathered(part), f"values of {table.name}")
        return told

    def serve_until(self, state: State, weight: float = 1.0, word: int = 0) -> None:
        """Serves the other ranks until all of them are "idle" (in their backward), or all "finished", or all have
        "evaluated", or all are "asking" for values of a whole table, and so on; learns what they declare."""
        nothing = torch.empty(0, dtype=torch.int64)
        self.learned = []
        for first in range(0, len(self.pulled), FLAGS):
            spoken_of = self.pulled[first : first + FLAGS]
            mine = sum(table.is_learned << place for place, table in enumerate(spoken_of))
            device = spoken_of[0].shard.device
            request = LookupRequest(state, nothing.to(device), False, self.transport.step, weight, mine, word)
            outcome = self._serve(request)
            self.weights, self.words = outcome.weights, outcome.words
            self.learned += [table for place, table in enumerate(spoken_of) if outcome.flags >> place & 1]

    def _serve(self, request: LookupRequest) -> LookupRound:
        """Rounds until no rank asks for a table."""
        with torch.no_grad():
            while (outcome := self._round(request)).table is not None:
                pass
        return outcome
