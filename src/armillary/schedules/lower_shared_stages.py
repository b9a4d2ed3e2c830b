"""Stages whose micro-batches take turns on ranks of their own: everything goes from rank to rank around the actions.

Activations go up and their gradients down, from the rank of a micro-batch to its rank of the next stage. A rank joins
its gradients to the sum of the micro-batch before (`SUM`) and hands it on, the last of a step to the stage's owner.
That steps (`UPDATE`) and hands the new weights to the rank that reads them first, that one to the next (`UNSHARD`),
each when it reads them. Buffers go with the micro-batches (`LOAD_BUFFERS`): running statistics are kept once, in order.

What an owner does between two of its actions it does when the tick is over that finished the sum, or the norm. Nothing
is sent before its reader is handed in: it might never be read.

Note [Norms]. Where gradients are clipped by a norm over all stages, owners add their squares on the way down. The first
stage's knows the whole, which goes up again from owner to owner.

Source: Fournier & Oyallon, 2024 (data and model parallelism with shared devices); see `shared.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import NO_MICRO_BATCH, Instruction, StageMessage
from armillary.schedules.rank_list import InstructionWriter, ScheduledAction, WorkerWriter
from armillary.schedules.schedule import Cell, Schedule

__all__ = ["SharedStagesLowering", "TakesTurns"]


class _Event(NamedTuple):
    """What an owner does when a tick is over, counted in the step of which it is: takes a sum, or learns of a norm."""

    tick: int
    stage: int
    is_norm: bool


class TakesTurns(Protocol):
    """Who takes turns, and which way weights go."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def devices(self) -> int:
        """How many ranks there are."""

    def rank_of(self, place: Cell) -> int:
        """The rank that runs this stage for this micro-batch of this step."""

    def ranks(self, stage: int) -> Sequence[int]:
        """Those that run a stage."""

    def owner(self, stage: int) -> int:
        """The one of them whose optimizer steps."""

    def last(self, step: int, stage: int) -> int:
        """The one on which the sum of a step's gradients is finished."""

    def complete(self, step: int, stage: int) -> int:
        """The tick after which that sum is there."""

    def weight_path(self, version: int, stage: int) -> Sequence[int]:
        """The way of a version from hand to hand, from its owner on."""


class SharedStagesLowering:
    """Of all stages of a schedule. Told of every action of every rank, in the one order."""

    def __init__(self, sharing: TakesTurns, clip: Clip | None, written: InstructionWriter) -> None:
        self._sharing, self._schedule, self._written = sharing, sharing.schedule, written
        self._ranks = WorkerWriter(range(sharing.devices), written)
        stages = range(self._schedule.stages)
        self._owners = [sharing.owner(stage) for stage in stages]
        self._has_norms = clip is not None and clip.needs_all_stages
        self._waits = clip is not None and clip.waits and self._has_norms
        self.passed = frozenset(stage for stage in written.wires.buffered if len(sharing.ranks(stage)) > 1)
        self._events = [_Event(sharing.complete(0, stage), stage, False) for stage in reversed(stages)]
        if self._has_norms:
            self._events += [_Event(sharing.complete(0, 0), stage, True) for stage in stages[1:]]
        self._done = 0  # events, of all steps
        self._steps = 0  # handed in
        self._newest = [0] * sharing.devices  # version, by rank
        self._owed: dict[int, int] = {}  # by stage: the micro-batch, counted through, that buffers are to be sent for

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""
        return frozenset(stage for stage, owner in enumerate(self._owners) if owner == self._written.rank)

    def begin_step(self, step: int) -> None:
        """One more step is handed in."""
        self._steps = step + 1
        self._pass_buffers(step * self._schedule.period)

    def before(self, due: ScheduledAction) -> None:
        """Owners do what is due; a forward gets its weights and buffers, a backward has those of its forward."""
        self._close(due.tick, due.tick)
        if due.kind == "F":
            self._adopt(due)
            self._bring(due.stage, self._sharing.rank_of(due.place), self._schedule.version(due.place), due.tick)

    def after(self, due: ScheduledAction) -> None:
        """What the action needed, and what it has made."""
        step, micro_batch, j = due.place
        here, before, after = self._sharing.rank_of(due.place), j - 1, j + 1
        if due.kind == "F":
            if after < self._schedule.stages:
                above = self._sharing.rank_of((step, micro_batch, after))
                self._ranks.passes(StageMessage("activation", *due.place), here, above, due.tick)
            if j in self.passed:
                self._owed[j] = self._number(due) + 1
                self._pass_buffers(due.tick)
            return
        if after < self._schedule.stages:  # its gradient says that the activation has arrived
            above = self._sharing.rank_of((step, micro_batch, after))
            if self._ranks.is_here(here):
                self._written.over(StageMessage("activation", *due.place), above, due.tick)
            self._written.reads(StageMessage("activation gradient", step, micro_batch, after), above, here, due.tick)
        if before >= 0:
            below = self._sharing.rank_of((step, micro_batch, before))
            self._ranks.passes(StageMessage("activation gradient", *due.place), here, below, due.tick)
        self._sum(due, here)

    def _sum(self, due: ScheduledAction, here: int) -> None:
        step, micro_batch, j = due.place
        if micro_batch and (before := self._sharing.rank_of((step, micro_batch - 1, j))) != here:
            self._ranks.takes("SUM", here, due.tick, StageMessage("partial gradient", step, micro_batch - 1, j), before)
        if micro_batch + 1 < self._schedule.micro_batches:
            after = self._sharing.rank_of((step, micro_batch + 1, j))
            self._ranks.passes(StageMessage("partial gradient", *due.place), here, after, due.tick)
        else:
            self._ranks.passes(StageMessage("gradient", *due.place), here, self._owners[j], due.tick)

    def end_step(self, steps: int) -> None:
        """Owners have done all that the step's ticks made possible."""
        self._close(steps * self._schedule.period, steps * self._schedule.period)

    def rest(self, steps: int, tick: int) -> None:
        """Every owner makes the newest weights, version by version, and every rank gets them."""
        self._close(None, tick)
        for version in range(1, steps + 1):
            for stage in reversed(range(self._schedule.stages)):
                for rank in self._sharing.weight_path(version, stage):
                    self._bring(stage, rank, version, tick)

    def drain(self, steps: int, tick: int) -> None:
        """Nothing more: every rank has the newest."""

    def _close(self, before: int | None, tick: int) -> None:
        """What was finished before that tick, or at all."""
        while True:
            step, place = divmod(self._done, len(self._events))
            event = self._events[place]
            finished = event.tick + step * self._schedule.period
            if step >= self._steps or (before is not None and finished >= before):
                return
            self._done += 1
            if event.is_norm:
                self._know(event.stage, step, tick)
            else:
                self._make(event.stage, step, tick)

    def _make(self, stage: int, step: int, tick: int) -> None:
        """The owner steps with the step's gradients, and hands on, if no norm is waited for."""
        owner, last = self._owners[stage], self._sharing.last(step, stage)
        number = self._schedule.micro_batches - 1
        if last != owner:
            self._ranks.takes("SUM", owner, tick, StageMessage("gradient", step, number, stage), last)
        if self._has_norms:
            self._add_norm(stage, step, tick)
        self._ranks.does(owner, Instruction("UPDATE", tick, step, number, stage))
        if stage == 0 and self._has_norms:
            self._pass_up(stage, step, tick)
        if stage == 0 or not self._waits:
            self._has(stage, owner, tick)

    def _add_norm(self, stage: int, step: int, tick: int) -> None:
        """See Note [Norms]."""
        owner = self._owners[stage]
        self._ranks.does(owner, Instruction("NORM", tick, step, self._schedule.micro_batches - 1, stage))
        if stage + 1 < self._schedule.stages:
            above = StageMessage("partial norm", step, NO_MICRO_BATCH, stage + 1)
            self._written.reads(above, self._owners[stage + 1], owner, tick)
        if stage > 0:
            own = StageMessage("partial norm", step, NO_MICRO_BATCH, stage)
            self._ranks.passes(own, owner, self._owners[stage - 1], tick)

    def _pass_up(self, stage: int, step: int, tick: int) -> None:
        if stage + 1 < self._schedule.stages:
            message = StageMessage("norm", step, NO_MICRO_BATCH, stage)
            self._ranks.passes(message, self._owners[stage], self._owners[stage + 1], tick)

    def _know(self, stage: int, step: int, tick: int) -> None:
        message = StageMessage("norm", step, NO_MICRO_BATCH, stage - 1)
        self._ranks.takes("RECV_NORM", self._owners[stage], tick, message, self._owners[stage - 1])
        self._pass_up(stage, step, tick)
        if self._waits:
            self._has(stage, self._owners[stage], tick)

    def _bring(self, stage: int, rank: int, version: int, tick: int) -> None:
        """Weights come from the rank before on their way."""
        while rank != self._owners[stage] and self._newest[rank] < version:
            way = self._sharing.weight_path(self._newest[rank] + 1, stage)
            before = way[way.index(rank) - 1]
            message = StageMessage("weights", self._newest[rank] + 1, before, stage)
            self._ranks.takes("UNSHARD", rank, tick, message, before)
            self._has(stage, rank, tick)

    def _has(self, stage: int, rank: int, tick: int) -> None:
        """One version more is there, and goes to the next."""
        self._newest[rank] += 1
        version = self._newest[rank]
        way = self._sharing.weight_path(version, stage)
        for after in way[way.index(rank) + 1 :][:1]:
            self._ranks.passes(StageMessage("weights", version, rank, stage), rank, after, tick)

    def _number(self, due: ScheduledAction) -> int:
        return due.step * self._schedule.micro_batches + due.micro_batch

    def _adopt(self, due: ScheduledAction) -> None:
        if due.stage in self.passed and (number := self._number(due)):
            place = *divmod(number - 1, self._schedule.micro_batches), due.stage
            here, before = self._sharing.rank_of(due.place), self._sharing.rank_of(place)
            self._ranks.takes("LOAD_BUFFERS", here, due.tick, StageMessage("buffers", *place), before)

    def _pass_buffers(self, tick: int) -> None:
        """Those whose reader is handed in."""
        count = self._schedule.micro_batches
        for stage, number in sorted(self._owed.items()):
            if number < self._steps * count:
                del self._owed[stage]
                made, read = (*divmod(number - 1, count), stage), (*divmod(number, count), stage)
                ends = self._sharing.rank_of(made), self._sharing.rank_of(read)
                self._ranks.passes(StageMessage("buffers", *made), *ends, tick)
