"""Gradients of rows at rest: rows that no rank reads in the next batch may move after it has begun.

Owners know from the ids that went ahead which rows of a batch the next one does not read, and tell those that push
them (`Early.tell`). Of such rows the gradients leave at the next turn of the loop, behind the rows that its forward
waits for, and land before the next step: the link carries them while all compute. The optimizer then takes with them
the step they missed (`late_step.py`).

    backward of b       gradients of the other rows are pushed; these wait
    step of b           what the optimizer is now is kept for them
    turn of b + 1       they leave
    end of b + 1's backward, or whatever else would see them missing     they land and are stepped

What would see them missing: a look-up of the table that was not foreseen, a second backward before the turn, a load,
checkpoint or export of the table, `finish`, and whoever works with `.grad` between backward and step. In the last
case, or if no step was made, they join `.grad`, and that table defers no more. All of it is collective, and happens at
a moment that is the same on every rank (design law 8). What is under way lands at the next turn at the latest, since a
loop may pass over a batch.

Bitwise equality with nothing deferred: a row's gradients, of all ranks, wait or leave together, so they are added in
the same order; and nobody reads the row, or moves it, between the step it missed and the one it takes.

Source: the idea is BagPipe's delayed synchronisation (Agarwal et al., SOSP 2023).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.runtime.hybrid.flight import Flight, advance_together
from armillary.runtime.hybrid.late_step import LateSteps, Moment
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport

__all__ = ["Deferral", "Resting"]

Resting = tuple[Tensor, Tensor]  # (rows served,) and (rows asked for,) bool: which of them rest


@dataclass(eq=False)
class Deferred:
    """Of one table and backward. moment: of the step that was made without it. is_dropped: this rank's optimizer had no
    gradient to step with; it is sent all the same, as other ranks may have one."""

    table: RowTable
    flight: Flight
    moment: Moment | None = None
    is_dropped: bool = False

    def land(self, transport: Transport) -> tuple[Tensor, Tensor]:
        rows, sums = self.flight.land(transport)
        return rows, sums


class Deferral:
    """State of one rank. waiting: of the last backward, not sent; under_way: sent at the last turn.

    stopped: tables that defer no more. unstepped: those that have exchanged gradients since the last step; a row among
    these would be stepped twice. late_steps: set by the run, which knows the optimizer.
    """

    late_steps: LateSteps

    def __init__(self, transport: Transport, serve: Callable[[], None]):
        self.transport, self.serve = transport, serve
        self.waiting: list[Deferred] = []
        self.under_way: list[Deferred] = []
        self.stopped: set[str] = set()
        self.unstepped: set[str] = set()

    def defers(self, table: RowTable) -> bool:
        """Whether its gradients may wait, if it is known which."""
        return table.look_ahead == "gradients" and table.name not in self.stopped

    def split(
        self, table: RowTable, gradients: Sequence[Tensor], tickets: Sequence[Any], resting: Sequence[Resting]
    ) -> tuple[list[Tensor], list[Any]]:
        """Keeps what may wait of the gradients of these look-ups, all of the table's; returns what may not."""
        assert table.exchange.part is not None and table.exchange.push_requests == 1, table.name
        parts = [table.exchange.part(ticket, *of_it) for ticket, of_it in zip(tickets, resting, strict=True)]
        later = [gradient[heard] for gradient, (_, heard) in zip(gradients, resting, strict=True)]
        now = [gradient[~heard] for gradient, (_, heard) in zip(gradients, resting, strict=True)]
        push = table.exchange.push(later, [resting for _, resting in parts], table.ownership, table.place)
        self.waiting.append(Deferred(table, Flight(push, table.name, 0)))
        return now, [others for others, _ in parts]

    def mark(self) -> None:
        """The optimizer steps now."""
        for deferred in self.waiting:
            deferred.moment = None if deferred.table.gradient is None else self.late_steps.moment(deferred.table)
            deferred.is_dropped = deferred.moment is None

    @property
    def is_stepped(self) -> bool:
        return all(deferred.is_dropped or deferred.moment is not None for deferred in self.waiting)

    def leave(self) -> None:
        """A turn of the loop; on every rank."""
        if not self.is_stepped:
            self.catch_up()
        advance_together([deferred.flight for deferred in self.waiting], self.transport)
        self.under_way += self.waiting
        self.waiting = []

    def arrive(self) -> None:
        """What is under way lands and is stepped. Asks nothing of anyone."""
        under_way, self.under_way = self.under_way, []
        for deferred in under_way:
            arrived = deferred.land(self.transport)
            if deferred.moment is not None:
                self.late_steps.step(deferred.table, deferred.moment, *arrived)

    def catch_up(self) -> None:
        """Tables and gradients are as if nothing had been deferred. Collective if anything waits."""
        self.arrive()
        is_stepped, waiting, self.waiting = self.is_stepped, self.waiting, []
        advance_together([deferred.flight for deferred in waiting], self.transport)
        if is_stepped:
            self.under_way = waiting
            self.arrive()
            return
        for deferred in waiting:
            self.stopped.add(deferred.table.name)
            arrived = deferred.land(self.transport)
            if deferred.table.gradient is not None:
                with torch.no_grad():
                    deferred.table.deposit(*arrived)

    def join(self) -> None:
        """`.grad` is looked at: what waits for the same step joins it. Collective if anything does."""
        if not self.is_stepped:
            self.catch_up()

    def meet(self) -> None:
        """A table's rows are set, on every rank: all meet, as some may still be reading, and catch up."""
        self.serve()
        self.catch_up()

    def see_to_reads(self, steps: Sequence[float]) -> None:
        """A rank reads rows, and every rank has taken so many steps; on every rank. What a step was made without must
        be in the table, unless ranks read between one another's steps: then nobody can say what they should see."""
        self.arrive()
        if self.is_stepped and len(set(steps)) == 1:
            self.catch_up()
