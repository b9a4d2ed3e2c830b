"""Gradients of rows that no rank reads in the next batch arrive after it has begun.

Owners know from the ids that went ahead which rows of a batch the next one does not read, and tell those that push
them (`PrefetchedLookup.tell`). Of such rows the gradients leave when the next batch begins, behind the rows that its
forward waits for, and land before the next step: the link carries them while all compute. The optimizer then takes
with them the step they missed (`catch_up_step.py`).

    backward of b           gradients of the other rows are pushed; these wait
    step of b               what the optimizer is now is kept for them
    b + 1 begins            they leave
    end of its backward, or whatever else would see them missing     they arrive and are stepped

What would see them missing: a look-up of the table that was not predicted, a second backward before the next batch, a
load, checkpoint or export of the table, `finish`, and whoever works with `.grad` between backward and step. In the last
case, or if no step was made, they join `.grad`, and that table delays no more. All of it is collective, and happens at
a moment that is the same on every rank (design law 8). What is under way lands when the next batch begins at the
latest, since a loop may pass over a batch.

Bitwise equality with nothing delayed: a row's gradients, of all ranks, wait or leave together, so they are added in
the same order; and nobody reads the row, or moves it, between the step it missed and the one it takes.

Source: the idea is BagPipe's delayed synchronisation (Agarwal et al., SOSP 2023).
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.facts.group import PrefetchKind
from armillary.runtime.hybrid.in_flight import InFlight, start_coalesced
from armillary.runtime.hybrid.prefetch import Stepper
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.prefetch.catch_up_step import CatchUpMoment, catch_up, moment_of
from armillary.runtime.prefetch.delay import Unused
from armillary.runtime.transport import Transport

__all__ = ["DelayedGradients"]


@dataclass(eq=False)
class Waiting:
    """Of one table and backward. moment: of the step that was made without it. is_dropped: this rank's optimizer had no
    gradient to step with; it is sent all the same, as other ranks may have one."""

    table: RowTable
    flight: InFlight
    moment: CatchUpMoment | None = None
    is_dropped: bool = False

    def finish(self, transport: Transport) -> tuple[Tensor, Tensor]:
        rows, sums = self.flight.finish(transport)
        return rows, sums


class DelayedGradients:
    """State of one rank; what `Delay` says of each method holds here.

    waiting: of the last backward, not sent; under_way: sent when this batch began.
    stopped: tables that delay no more. unstepped: those that have exchanged gradients since the last step; a row among
    these would be stepped twice. Who steps is known weakly: tables, which know this, live with the model, and the
    optimizer should not.

    Args:
        kinds: how tables prefetch, by name. stopped: those that must not delay.
    """

    def __init__(self, kinds: Mapping[str, PrefetchKind], transport: Transport, stopped: Collection[str]):
        self.names = {name for name, kind in kinds.items() if kind == "gradients"}
        self.transport = transport
        self.waiting: list[Waiting] = []
        self.under_way: list[Waiting] = []
        self.stopped = set(stopped)
        self.unstepped: set[str] = set()
        self._stepper: weakref.ref[Stepper] | None = None

    def delays(self, table: RowTable) -> bool:
        return table.name in self.names and table.name not in self.stopped

    def is_holding(self, table: RowTable) -> bool:
        return table.name in self.names

    def hold_no_more(self) -> None:
        self.stopped |= self.names

    def split(
        self, table: RowTable, gradients: list[Tensor], routes: list[Any], unused: Sequence[Unused | None]
    ) -> tuple[list[Tensor], list[Any]]:
        told = [one for one in unused if one is not None]
        may_wait = len(told) == len(unused) and table.name not in self.unstepped and self.delays(table)
        self.unstepped.add(table.name)
        return self._split(table, gradients, routes, told) if may_wait else (gradients, routes)

    def _split(
        self, table: RowTable, gradients: Sequence[Tensor], routes: Sequence[Any], unused: Sequence[Unused]
    ) -> tuple[list[Tensor], list[Any]]:
        """Keeps what may wait of the gradients of these look-ups, all of the table's; returns what may not."""
        assert table.exchange.part is not None and table.exchange.push_requests == 1, table.name
        parts = [table.exchange.part(route, *of_it) for route, of_it in zip(routes, unused, strict=True)]
        later = [gradient[heard] for gradient, (_, heard) in zip(gradients, unused, strict=True)]
        now = [gradient[~heard] for gradient, (_, heard) in zip(gradients, unused, strict=True)]
        push = table.exchange.push(later, [waiting for _, waiting in parts], table.ownership, table.place)
        self.waiting.append(Waiting(table, InFlight(push, table.name, 0)))
        return now, [others for others, _ in parts]

    def begin_push(self) -> None:
        """If something waits, it is of a backward after which the loop got no batch."""
        if self.waiting:
            self.finish()

    def step(self, stepper: Stepper) -> None:
        self._stepper = weakref.ref(stepper)
        for waiting in self.waiting:
            waiting.moment = None if waiting.table.gradient is None else moment_of(stepper, waiting.table)
            waiting.is_dropped = waiting.moment is None
        self.unstepped.clear()

    @property
    def stepper(self) -> Stepper:
        """
        Raises:
            RuntimeError: it is gone.
        """
        stepper = self._stepper() if self._stepper is not None else None
        if stepper is None:
            raise RuntimeError(
                "gradients of the last step are still to be stepped, but run and optimizer are gone; call run.close() "
                "on every rank before you let go of them"
            )
        return stepper

    @property
    def is_stepped(self) -> bool:
        return all(waiting.is_dropped or waiting.moment is not None for waiting in self.waiting)

    def leave(self) -> None:
        if not self.is_stepped:
            self.finish()
        start_coalesced([waiting.flight for waiting in self.waiting], self.transport)
        self.under_way += self.waiting
        self.waiting = []

    def arrive(self) -> None:
        under_way, self.under_way = self.under_way, []
        for waiting in under_way:
            arrived = waiting.finish(self.transport)
            if waiting.moment is not None:
                catch_up(self.stepper, waiting.table, waiting.moment, *arrived)

    def finish(self) -> None:
        self.arrive()
        is_stepped, waiting, self.waiting = self.is_stepped, self.waiting, []
        start_coalesced([one.flight for one in waiting], self.transport)
        if is_stepped:
            self.under_way = waiting
            self.arrive()
            return
        for one in waiting:
            self.stopped.add(one.table.name)
            arrived = one.finish(self.transport)
            if one.table.gradient is not None:
                with torch.no_grad():
                    one.table.deposit(*arrived)

    def join(self) -> None:
        if not self.is_stepped:
            self.finish()

    def see_reads(self, read_at: Sequence[float]) -> None:
        """What a step was made without must be in the table, unless ranks read between one another's steps: then nobody
        can say what they should see."""
        self.arrive()
        if self.is_stepped and len(set(read_at)) == 1:
            self.finish()
