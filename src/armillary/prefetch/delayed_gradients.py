"""Delayed gradients: those of rows that no rank reads in the next batch arrive after it has begun.

Owners know from the ids that went ahead which rows of a batch the next one does not read, and tell those that push
them (`PrefetchedLookup.tell`). Of such rows the gradients leave when the next batch begins, behind the rows that its
forward waits for, and land before the next step: the link carries them while all compute. The optimizer then takes
with them the step they missed (`catch_up`).

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.plans.group import PrefetchKind
from armillary.tables.lookups import Stepper, Unused
from armillary.tables.optimizer_state import Held
from armillary.tables.optimizers import options_of, over
from armillary.tables.table import RowTable
from armillary.transport.in_flight import InFlight, start_coalesced
from armillary.transport.transport import Transport

__all__ = ["DelayedGradients", "can_split"]

# Of every optimizer of torch, and what its schedulers add.
_ATTRIBUTES = {
    *("defaults", "state", "param_groups", "step", "_opt_called"),
    *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *(f"_optimizer_{way}_{when}_hooks" for way in ("state_dict", "load_state_dict") for when in ("pre", "post")),
}


def can_split(optimizer: Optimizer, table: RowTable) -> bool:
    """Whether a step in two parts is the same bit for bit: vector and scalar code of torch's kernels round alike in
    single and double precision, unless they are fused; and nothing is kept in attributes, which nobody could put back
    to what they were."""
    options = options_of(optimizer, table.parameter) or {}
    is_plain = table.shard.dtype in (torch.float32, torch.float64) and not options.get("fused")
    return is_plain and not table.lists_rows and not set(vars(optimizer)) - _ATTRIBUTES


class CatchUpMoment(NamedTuple):
    """The optimizer as it was at one step of a table. state: what of it has no rows; None: there was none at all."""

    options: dict[str, Any]
    state: dict[str, Any] | None


def moment_of(stepper: Stepper, table: RowTable) -> CatchUpMoment | None:
    """Now, right before a step; None where the optimizer does not hold the table."""
    optimizer, held = stepper.optimizer, stepper.held[table.name]
    options = options_of(optimizer, table.parameter)
    if options is None:
        return None
    state = optimizer.state.get(table.parameter)
    if not state:
        return CatchUpMoment(_copied(options), None)
    return CatchUpMoment(_copied(options), _copied({name: value for name, value in state.items() if name not in held}))


@torch.no_grad()
def catch_up(stepper: Stepper, table: RowTable, moment: CatchUpMoment, rows: Tensor, sums: Tensor) -> None:
    """The step of that moment on local rows (k,) with their gradient (k, *row shape): exactly the step they missed.

    Rows, and state that has rows, have not moved since: nobody reads a row whose gradient is under way, and tables with
    a window are those of which rows without gradient stay put.
    """
    if not len(rows):
        return
    held = stepper.held[table.name]
    parameter = nn.Parameter(table.shard.index_select(0, rows))
    parameter.grad = sums
    same = over(stepper.optimizer, [{**moment.options, "params": [parameter]}])
    if moment.state is not None:
        mine = {name: whole.index_select(0, rows) for name, whole in held.items()}
        same.state[parameter] = {**_copied(moment.state), **mine}
    same.step()
    table.put_back(rows, parameter.detach())
    _keep(held, rows, same.state[parameter], table.shard)


def _keep(held: Held, rows: Tensor, state: dict[str, Any], shard: Tensor) -> None:
    """Puts the rows' state back. New state begins as zero rows."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == (len(rows), *shard.shape[1:]):
            if name not in held:
                held[name] = value.new_zeros(shard.shape)
            held[name].index_copy_(0, rows, value)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name != "params"
    }


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

    def has_delayed(self, table: RowTable) -> bool:
        return table.name in self.names

    def stop(self) -> None:
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
        parts = [table.exchange.part(route, one.served, one.asked) for route, one in zip(routes, unused, strict=True)]
        later = [gradient[one.asked] for gradient, one in zip(gradients, unused, strict=True)]
        now = [gradient[~one.asked] for gradient, one in zip(gradients, unused, strict=True)]
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
