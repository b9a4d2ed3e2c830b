"""Answers every read of a row-sharded table, this rank's own and the other ranks'.

A read repeats rounds (`exchanges/look_up.py`) until its table was served. A rank that has no read to make serves the
others until all are idle. The rows that a read brings are a leaf of the autograd graph, so their gradient arrives
merged: torch's own backward of the gather adds up duplicates, in any mode.

`TableNorms` takes the norms of all tables in one small all-reduce, once per step. `Prefetch` is what loops, look-ups,
backwards and steps tell of themselves; `NoPrefetch` answers where no table of a plan prefetches.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.exchanges.exchange import Pulled
from armillary.exchanges.look_up import FIELDS, FLAGS, STEP, LookupRequest, LookupRound, State, look_up
from armillary.models.gradient_hooks import on_grad_accumulated
from armillary.plans.requests import gathered, summed
from armillary.tables.optimizer_state import Held
from armillary.tables.table import LookUp, RowTable
from armillary.transport.in_flight import InFlight, start_coalesced
from armillary.transport.transport import Transport

__all__ = [
    "Delay",
    "LookUps",
    "NoDelay",
    "NoPrefetch",
    "PiggybackColumns",
    "Prefetch",
    "Stepper",
    "TableNorms",
    "Unused",
]


class TableNorms:
    """Those that were asked for since the gradients changed.

    serve: looks rows up for ranks that read on their own, until all ask.
    """

    def __init__(self, tables: Sequence[RowTable], transport: Transport, serve: Callable[[], None]) -> None:
        self.tables, self.transport, self._serve = tables, transport, serve
        self.known: dict[tuple[Any, ...], Tensor] = {}

    def forget(self) -> None:
        """There are other gradients."""
        self.known.clear()

    def of(self, table: RowTable, order: float) -> Tensor:
        """Of the whole gradient of a table, on its device. Collective the first time it is asked for."""
        having = [other for other in self.tables if other.gradient is not None]
        versions = tuple((other.name, other.gradient._version) for other in having)  # type: ignore[union-attr]
        key = (order, versions, self.transport.step)
        if key not in self.known:
            with self.transport.within("gradient norm"):
                self._serve()
                self.known = {key: self._norms(having, order)}
        return self.known[key][having.index(table)].to(table.shard)

    def _norms(self, tables: Sequence[RowTable], order: float) -> Tensor:
        """Adds |g|^order over ranks; a table that every rank holds whole is counted on rank 0 alone."""
        mine = [_powered_norm(t, order) if t.is_pulled or self.transport.place.rank == 0 else _nought() for t in tables]
        local = torch.stack(mine)
        if order == float("inf"):
            return torch.tensor(self.transport.agree_largest(local.tolist()), dtype=torch.float64)
        total: Tensor = self.transport.complete(summed(local), "gradient norms")
        return total ** (1.0 / order)


def _powered_norm(table: RowTable, order: float) -> Tensor:
    """|g|^order of the local rows (the largest |g| for order inf), in float64."""
    gradient = table.gradient
    assert gradient is not None
    if not gradient.numel():
        return _nought()
    norm: Tensor = torch.linalg.vector_norm(gradient.double(), order).cpu()
    return norm if order == float("inf") else norm**order


def _nought() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


Leaves = Callable[[], Sequence[Tensor]]  # the tensors of a batch


class PiggybackColumns(NamedTuple):
    """What goes with a round of look-ups. columns: (ranks, n) float64 for the headers, None for none. flights: programs
    whose next request leaves at the same moment."""

    columns: Tensor | None = None
    flights: Sequence[InFlight] = ()


class Stepper(Protocol):
    """Who steps. held: the optimizer state of each table's shard, by table and name."""

    optimizer: Optimizer
    held: dict[str, Held]


class Unused(NamedTuple):
    """Which of a look-up's rows no rank reads in the next batch: bool, of the rows served and of those asked for."""

    served: Tensor
    asked: Tensor


class Delay(Protocol):
    """Gradients of a table that may follow later, or none."""

    def delays(self, table: RowTable) -> bool:
        """Whether gradients of this table may wait, if it is known which."""

    def has_delayed(self, table: RowTable) -> bool:
        """Whether some of a table's gradients may be waiting."""

    def split(
        self, table: RowTable, gradients: list[Tensor], routes: list[Any], unused: Sequence[Unused | None]
    ) -> tuple[list[Tensor], list[Any]]:
        """As `Prefetch.hold`. unused: by route; None where nobody told."""

    def leave(self) -> None:
        """A batch begins, on every rank: what waits is sent."""

    def arrive(self) -> None:
        """What is under way lands and is stepped. Asks nobody."""

    def begin_push(self) -> None:
        """The first push of a backward is about to leave."""

    def see_reads(self, read_at: Sequence[float]) -> None:
        """A rank reads rows, at these steps of all ranks."""

    def step(self, stepper: Stepper) -> None:
        """An optimizer steps now."""

    def join(self) -> None:
        """A gradient is looked at: what waits of the same step joins it. Collective if anything waits."""

    def finish(self) -> None:
        """Weights are as if nothing had waited. Collective if anything waits."""

    def stop(self) -> None:
        """From here on every gradient leaves at once."""


class NoDelay:
    """Every gradient leaves at once."""

    def delays(self, table: RowTable) -> bool:
        return False

    has_delayed = delays

    def split(
        self, table: RowTable, gradients: list[Tensor], routes: list[Any], unused: Sequence[Unused | None]
    ) -> tuple[list[Tensor], list[Any]]:
        return gradients, routes

    def see_reads(self, read_at: Sequence[float]) -> None:
        pass

    def step(self, stepper: Stepper) -> None:
        pass

    def arrive(self) -> None:
        pass

    leave = begin_push = join = finish = stop = arrive


class Prefetch(Protocol):
    """depth: how many batches a loop draws before their turn. delay: of gradients."""

    depth: int
    delay: Delay

    # A loop over batches. Every rank calls each of these.
    def begin_loop(self) -> None:
        """Nothing is predicted yet."""

    def begin_batch(self, batch: Leaves, last: Leaves) -> None:
        """The loop gets `batch`; `last` is the one `depth` after it. Right after a round in which all were idle."""

    def end_loop(self) -> None:
        """What was asked for batches that will not come is not waited for."""

    # A look-up, and a round of look-ups.
    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        """The look-up of these sorted distinct keys, if its rows are here. None: it must be made. Asks nobody."""

    def piggyback(self, is_idle: bool) -> PiggybackColumns:
        """What goes with the next round. is_idle: this rank wants no rows by it."""

    def receive_columns(self, columns: Tensor, read_at: Sequence[float]) -> None:
        """A round's headers are here. columns: (ranks, n), what each rank sent by `piggyback`. read_at: every rank's
        step, if some rank reads rows by this round."""

    # A backward.
    def seal(self) -> None:
        """All ranks were idle: no rank will make another look-up of this batch. Settles what is to be pushed."""

    def hold(
        self, table: RowTable, look_ups: Sequence[LookUp], gradients: list[Tensor], routes: list[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        """Of a table's gradients, those that leave now, with their routes. The others wait, see `delay`."""


class NoPrefetch:
    """Every look-up is made when it is read, every gradient leaves at once."""

    depth = 0
    delay: Delay = NoDelay()

    def begin_loop(self) -> None:
        pass

    def begin_batch(self, batch: Leaves, last: Leaves) -> None:
        pass

    def end_loop(self) -> None:
        pass

    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        return None

    def piggyback(self, is_idle: bool) -> PiggybackColumns:
        return PiggybackColumns()

    def receive_columns(self, columns: Tensor, read_at: Sequence[float]) -> None:
        pass

    def seal(self) -> None:
        pass

    def hold(
        self, table: RowTable, look_ups: Sequence[LookUp], gradients: list[Tensor], routes: list[Any]
    ) -> tuple[list[Tensor], list[Any]]:
        return gradients, routes


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
        self.is_exhausted = False  # this rank's data have run out: what it reads is not learned from

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
        needs_gradient = learns and not self.is_exhausted
        waiting = self.prefetch.take(table, keys) if needs_gradient else None
        if waiting is None:
            with torch.no_grad():
                rows = self._fetch(table, keys, needs_gradient)
            waiting = table.pending[-1] if needs_gradient else None
        if waiting is not None:
            rows = self._await_gradient(table, waiting)
        elif learns:  # the backward runs as everywhere, but its gradient stays here
            place = self.tables.index(table)
            on_grad_accumulated(rows.requires_grad_(), self, lambda here, _: here.on_gradient(here.tables[place]))
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
        piggybacked = self.prefetch.piggyback(isinstance(request.table, str))
        program = look_up(request._replace(extra=piggybacked.columns), self.served, self.transport.place)
        opening = InFlight(program, "look-ups", 0)
        start_coalesced([opening, *piggybacked.flights], self.transport)
        assert opening.wait is not None
        headers = opening.wait()
        wanted = [int(code) for code in headers[:, 0].tolist() if code > 0]
        self.prefetch.receive_columns(headers[:, FIELDS:], headers[:, STEP].tolist() if wanted else ())
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
        place, known = self.tables.index(table), weakref.ref(waiting)  # both hold the rows: see `on_grad_accumulated`
        on_grad_accumulated(rows.requires_grad_(), self, lambda here, _: here._arrived(here.tables[place], known()))
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

    def meet(self, table: RowTable) -> None:
        """All of a table's rows are looked at or set, on every rank, while some may still be reading."""
        if self.prefetch.delay.has_delayed(table):
            self.serve_until("idle")
            self.prefetch.delay.finish()

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
