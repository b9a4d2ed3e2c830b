"""Carries the groups of a plan through every backward: gradients leave as they appear and are final when it returns.

One queue fixes the order of every request (design law 8): groups are launched in plan order, whatever order their
gradients appear in, and after each every earlier program that still has requests to make makes one more, so that a link
has something to carry while its answer is waited for. What never got a gradient is sent as zero at the end of backward:
a rank that skipped a layer or a table joins all the same. Groups that exchange weights do so before or after the
optimizer's step.

A backward inside another (reentrant activation checkpointing) ends first. What it brought is exchanged then, but rows
that were looked up outside it get their gradient later: tables wait for the end of a backward that is in no other.

With the mean over declared weights, every value is a part of the mean before it leaves: weight / sum of weights. So no
sum exceeds what one process would have, in whatever dtype, and the divisor is exact. The sum is known from the headers
of look-ups; without look-ups, one small request at the first gradient asks for it, long before the first bucket leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from armillary.models.gradient_hooks import Backward, after_hooks, refuse_taken
from armillary.plans.requests import Program, summed
from armillary.runtime.dense_unit import TWICE, DenseUnit, nonfinite_together, warned_of_a_second_push
from armillary.runtime.loop_agreement import (
    BACKWARD,
    STEPS,
    WROTE,
    LastOptions,
    RankState,
    RankStates,
    exchange_states,
    refuse_written,
    unlike_options,
)
from armillary.runtime.replica_checks import alike
from armillary.runtime.weight_averaging import meet
from armillary.tables.lookups import LookUps, NoPrefetch, Prefetch, TableNorms
from armillary.tables.table import RowTable
from armillary.transport.in_flight import InFlight, LaunchQueue, Leaving, see_through, start_coalesced
from armillary.transport.transport import Transport

__all__ = ["Executor", "RowUnit"]


@dataclass(eq=False)
class RowUnit:
    """A table."""

    name: str
    table: RowTable

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.table.parameter]


@dataclass(eq=False)
class Executor:
    """State of the exchange of one model. Between backwards: idle; inside one, the first of its queue are under way.

    mean: "workers" or "weights" (see `Plan`). is_syncing: False inside no_sync. on_settled: called, on every rank
    alike, when all gradients of a backward are final. loss_scale: by which the loop multiplies its losses now.
    on_local_grads: shown this rank's own gradients, with the names of their parameters, before others join them.
    """

    units: Sequence[DenseUnit | RowUnit]
    transport: Transport
    mean: Literal["workers", "weights"] = "workers"
    on_settled: Callable[[], None] = lambda: None
    loss_scale: Callable[[], float] = lambda: 1.0
    prefetch: Prefetch = field(default_factory=NoPrefetch)
    on_local_grads: Callable[[Sequence[str], Sequence[Tensor | None]], None] = lambda names, gradients: None
    is_syncing: bool = True
    is_open: bool = False
    task: int = -1  # the backward in which the exchange was opened, by torch's number
    is_settled: bool = False  # a backward was exchanged since the last step
    has_met: bool = False  # weights that meet before this step did so
    is_warned: bool = False  # that one step's gradients are coded twice
    settled: int = 0  # backwards that were exchanged
    weight: float = 1.0
    mean_weight: float = 1.0  # of the mean that this rank's gradients are, where weights say so
    weight_sum: InFlight | None = None  # asks for the sum of weights
    is_exhausted: bool = False  # this rank's data have run out: what it computes counts for nothing
    has_unsynced_grads: bool = False  # gradients that count wait for an exchange
    with_data: int = 0  # the first rank whose data have not run out
    options: LastOptions = field(default_factory=lambda: LastOptions({}))  # with which optimizers stepped last
    doing: int = BACKWARD
    late: list[int] = field(default_factory=list)  # ranks that took part in the last exchange in their step only
    state_wait: Callable[[], RankStates] | None = None  # the wait for what every rank says of itself
    seen: list[tuple[Tensor | None, int]] = field(default_factory=list)  # gradients then, with their versions

    def __post_init__(self) -> None:
        self.queue = LaunchQueue(self.transport, ())
        self.tables = [unit.table for unit in self.units if isinstance(unit, RowUnit)]
        self.look_ups = LookUps(self.tables, self.transport, self.on_rows, self.prefetch)
        self.norms = TableNorms(self.tables, self.transport, partial(self.look_ups.serve_until, "asking"))
        for table in self.tables:
            table.norms = self.norms.of
            table.joins, table.catches_up = self.prefetch.delay.join, self.prefetch.delay.finish
            table.meets = self.look_ups.meet
            table.reads = torch.compiler.disable(self.look_ups.read)  # a look-up is a graph break
            table.tells = self.look_ups.everyones
        self.removals: list[Callable[[], None]] = []
        self.mutes: list[Callable[[], None]] = []
        for place, unit in enumerate(self.units):
            if isinstance(unit, DenseUnit) and unit.may_leave:
                for index, parameter in enumerate(unit.bucket.parameters):
                    if parameter.requires_grad:
                        name = unit.bucket.layout.names[index]
                        told = partial(Executor._arrived, place=place, index=index)
                        self.removals.append(after_hooks(parameter, self, told, name))
        self.backward = Backward(self.transport.place.rank, dict(alike(self.units)))

    @property
    def scale(self) -> float:
        """What a gradient is multiplied by when it appears."""
        return 1.0 / self.transport.place.workers if self.mean == "workers" else 1.0

    @property
    def declared_weight(self) -> float:
        return self.weight if self.contributes else 0.0

    @property
    def contributes(self) -> bool:
        return self.has_unsynced_grads or not self.is_exhausted

    def set_exhausted(self, is_exhausted: bool) -> None:
        """This rank's data have run out, or there are some again. What had been accumulated before still counts, so
        gradients are silenced where they arise and not where they leave."""
        if is_exhausted == self.is_exhausted:
            return
        self.is_exhausted = self.look_ups.is_exhausted = is_exhausted
        for unmute in self.mutes:
            unmute()
        dense = [p for unit in self.units if isinstance(unit, DenseUnit) for p in unit.bucket.parameters]
        self.mutes = (
            [p.register_hook(torch.zeros_like).remove for p in dense if p.requires_grad] if is_exhausted else []
        )

    def refuse_cast(self) -> None:
        """
        Raises:
            ValueError: a parameter is of another dtype, device or shape than when the run began.
        """
        for unit in self.units:
            if isinstance(unit, DenseUnit):
                unit.bucket.refuse_cast(self.transport.place.rank)

    def throw_away(self, tables: Sequence[RowTable], others: Sequence[Tensor]) -> None:
        """What accumulated of these tables is dropped, as that of dense parameters was. others: may owe still."""
        if self.has_unsynced_grads:
            for table in tables:
                table.drop_accumulated()
            self.has_unsynced_grads = any(one.grad is not None for one in others) or any(
                one.accumulates for one in self.tables
            )

    def release(self) -> None:
        """Takes its hooks off the parameters; asks nobody."""
        self.set_exhausted(False)
        for remove in self.removals:
            remove()

    def _arrived(self, arrived: Tensor, place: int, index: int) -> None:
        """The gradient of a parameter of the dense unit at that place."""
        if not self._is_leaving():
            return
        unit = self.units[place]
        assert isinstance(unit, DenseUnit)
        name = unit.bucket.layout.names[index]
        refuse_taken(self.transport.place.rank, name, unit.bucket.parameters[index])
        if self.is_settled and not self.is_open and not self.is_warned:
            self.is_warned = warned_of_a_second_push(self.units, unit.bucket.parameters[index])
        is_again = self.is_open and unit.leaves and index not in unit.bucket.waiting
        self._open()
        if is_again:
            raise RuntimeError(f"rank {self.transport.place.rank}: {name} {TWICE}")
        if unit.leaves:
            if unit.bucket.deposit(index, self.scale, arrived):
                self.backward.leaves(name)
            self._launch_ready()

    def on_rows(self, table: RowTable) -> None:
        """A look-up's rows have their gradient."""
        if self._is_leaving():
            self._open()
            self._launch_ready()

    def _is_leaving(self) -> bool:
        """Notes a gradient; whether it is exchanged now or accumulates."""
        self.has_unsynced_grads |= not self.is_exhausted
        self.is_settled &= self.is_syncing  # what accumulates after an exchange must be exchanged before the step
        return self.is_syncing

    def _open(self) -> None:
        """The first gradient of a backward."""
        if self.is_open:
            return
        self.is_open = True
        self.backward.begin()
        for unit in self.units:
            if isinstance(unit, DenseUnit):
                unit.open(self.transport.step + 1)
        leaving = [unit for unit in self.units if isinstance(unit, RowUnit) or unit.leaves]
        self.queue = LaunchQueue(self.transport, leaving)
        if self.mean == "weights" and leaving and not self.look_ups.pulled:
            mine = torch.tensor([self.declared_weight], dtype=torch.float64)
            self.weight_sum = InFlight(summed(mine), "weights", 0)
            start_coalesced([self.weight_sum], self.transport)
        self.task = torch._C._current_graph_task_id()
        if self.task != -1:
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """The backward that opened the exchange is over; another one, in a node of which it ran, may still go on."""
        is_inner = torch._C._current_autograd_node() is not None
        with self.transport.within("backward"):
            self._settle(with_tables=not is_inner)

    def _launch_ready(self) -> None:
        is_outer = torch._C._current_graph_task_id() == self.task  # what is still awaited, only that one knows
        if is_outer and self.queue.is_next(self._is_ready):
            with self.transport.within("backward"):
                self.queue.launch(self._leave, self._is_ready)

    def _is_ready(self, unit: DenseUnit | RowUnit) -> bool:
        """A table that this rank did not read is known to be unread only at the end of backward."""
        if isinstance(unit, DenseUnit):
            return unit.bucket.is_ready
        return unit.table.is_ready and any(look_up.rows is not None for look_up in unit.table.pending)

    def _leave(self, unit: DenseUnit | RowUnit) -> Leaving:
        if not self.queue.flights:  # before anything is pushed, every rank must have made its look-ups
            self.look_ups.meet_in_backward(self.declared_weight, self._state(self.doing).rest)
            self.prefetch.delay.begin_push()
            self.mean_weight = self._mean_weight() if self.mean == "weights" else 1.0
            self._send_state()
        if isinstance(unit, DenseUnit):
            loss_scale = self.loss_scale() if unit.exchange.is_guarded else 1.0  # a wait on some devices
            leaving = unit.leave(self.transport.place, self.scale, self.contributes, self.mean_weight, loss_scale)
            self.on_local_grads(unit.bucket.layout.names, unit.bucket.own)
            return leaving
        with torch.no_grad():
            return self._leave_rows(unit.table)

    def _leave_rows(self, table: RowTable) -> Leaving:
        self.look_ups.forget_unlearned(table)
        self.look_ups.join_unread(table)
        if not table.pending:
            return Leaving(_nothing(), 0)
        look_ups = table.pending
        gradients, routes = table.take_gradients(self.scale * self.mean_weight)
        self.on_local_grads([table.name] * len(gradients), gradients)
        gradients, routes = self.prefetch.hold(table, look_ups, gradients, routes)
        push = table.exchange.push(gradients, routes, table.ownership, table.place)
        return Leaving(push, table.exchange.push_requests)

    def settle(self, doing: int = BACKWARD) -> None:
        """The end of backward: launches what is left, waits for all of it, makes every `.grad` final.

        Args:
            doing: LATE where this rank's backward touched nothing, and its optimizer is about to step.
        """
        self.doing = doing
        with self.transport.within("backward"):
            self._settle()
        self.doing = BACKWARD

    def _settle(self, with_tables: bool = True) -> None:
        self._open()
        if not with_tables:
            begun, units = len(self.queue.flights), self.queue.units
            self.queue.units = [*units[:begun], *(unit for unit in units[begun:] if isinstance(unit, DenseUnit))]
        self.queue.launch(self._leave)
        with torch.no_grad():
            for unit in self.units:
                if isinstance(unit, DenseUnit) and not unit.leaves:  # each rank steps by its own
                    self.on_local_grads(unit.bucket.layout.names, [one.grad for one in unit.parameters])
            see_through(self.queue.flights, self.transport)
            self.prefetch.delay.arrive()
            landed = nonfinite_together(self.queue.land(), self.queue.units)
            self._read_states()
            self.backward.end()
            for unit, result in zip(self.queue.units, landed, strict=True):
                self._apply(unit, result)
        self.queue = LaunchQueue(self.transport, ())
        self.is_open = self.has_unsynced_grads = False
        self.is_settled = with_tables or not self.tables
        self.settled += 1
        self.norms.forget()
        self.seen = self._versions() if self.late else []
        self.on_settled()

    def _state(self, doing: int) -> RankState:
        return RankState(self.transport.step, doing, self.options.number)

    def _ask_states(self, doing: int) -> Callable[[], RankStates]:
        """For what every rank says of itself, where no look-up brings it."""
        flight = InFlight(exchange_states(self._state(doing), self.transport.place.workers), "rank states", 0)
        start_coalesced([flight], self.transport)
        return partial(flight.finish, self.transport)

    def _send_state(self) -> None:
        """Before the first group leaves, when every rank is in its backward; not where nodes go on apart."""
        crosses_all = any(isinstance(unit, RowUnit) or unit.crosses_all for unit in self.queue.units)
        if self.look_ups.pulled:
            self.state_wait = partial(RankStates.told, self.transport.step, self.look_ups.words)
        elif self.transport.place.workers > 1 and crosses_all:
            self.state_wait = self._ask_states(self.doing)

    def _read_states(self) -> None:
        """All that was sent has landed."""
        self.late = []
        if self.state_wait is None:
            return
        with self.transport.unrecorded():
            heard, self.state_wait = self.state_wait(), None
            self.late = heard.late if len(heard.late) < len(heard.words) else []
            everyones = self.transport.share(self.options.options) if not heard.has_one_option else []
        if unlike := unlike_options(dict(enumerate(everyones))):
            raise RuntimeError(
                f"rank {self.transport.place.rank}: in step {self.transport.step} ranks stepped with different "
                f"options: {unlike}, so they no longer train alike; set options alike on every rank (let "
                "schedulers see the same numbers everywhere), and begin again from a checkpoint"
            )

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        """Of every gradient that is exchanged."""
        dense = [p.grad for unit in self.units if isinstance(unit, DenseUnit) and unit.leaves for p in unit.parameters]
        found = [*dense, *(table.gradient for table in self.tables)]
        return [(one, -1 if one is None else one._version) for one in found]

    def refuse_written(self) -> None:
        """Collective, before the first step after an exchange in which some rank came late.

        Raises:
            RuntimeError: a rank wrote into its gradients in between.
        """
        if not self.late:
            return
        now = self._versions()
        pairs = zip(now, self.seen, strict=True)
        wrote = any(one is not other or version != before for (one, version), (other, before) in pairs)
        with self.transport.unrecorded(), self.transport.within("step"):
            if self.look_ups.pulled:
                self.look_ups.serve_until("late")
            heard = self._ask_states(WROTE if wrote else STEPS)()
        late, self.late, self.seen = self.late, [], []
        refuse_written(heard, late)

    def _mean_weight(self) -> float:
        """What this rank declared over what all did; known from the look-ups' headers, else asked for."""
        asked, self.weight_sum = self.weight_sum, None
        total = sum(self.look_ups.weights) if asked is None else float(asked.finish(self.transport))
        return self.declared_weight / (total or 1.0)

    def _apply(self, unit: DenseUnit | RowUnit, result: Any) -> None:
        if isinstance(unit, DenseUnit):
            unit.take_gradients(result)
            return
        if result is None:
            return
        rows, sums = result
        if unit.table.is_pulled or len(rows):
            unit.table.deposit(rows, sums)

    def before_step(self) -> None:
        """An optimizer is about to step; nothing happens where another one has, or a closure is called again."""
        if not self.has_met:
            self.has_met = True
            meet(self.units, self.transport.step + 1, "before", self.transport)

    def after_step(self) -> None:
        self.transport.step += 1
        self.is_settled = self.has_met = False
        self.weight = 1.0
        meet(self.units, self.transport.step, "after", self.transport)


def _nothing() -> Program[None]:
    yield from ()
    return None
