"""Stages that several ranks run, each for a micro-batch of its own: sums and weights go from rank to rank.

A rank joins its gradients of a stage to the sum from the rank before (`SUM`) and hands it on; the last hands the
whole to the stage's owner, one more hop. The owner steps the optimizer (`UPDATE`). New weights stay where they come
(`handed_on.py`), or are lent for one action (`lent.py`). Who owns what, when an owner steps, and which way all this
goes is said in `messages.py`.

Note [Norms]. The last rank makes every sum, so it knows the norm over all stages after its last backward, and tells
every other owner.

Note [Late sums]. Where weights are lent, room is short: a sum leaves a hop's time before it is needed.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism).

Weights that stay where they have come: the owner hands each version to the first rank that reads it, that one on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import NO_MICRO_BATCH, Instruction, StageMessage
from armillary.schedules.lower_zero_ring import LentWeights, hop_ticks
from armillary.schedules.rank_list import InstructionWriter, ScheduledAction, WorkerWriter
from armillary.schedules.routes import closing, owner_of, sum_path, weight_path
from armillary.schedules.schedule import Schedule

__all__ = ["KeptWeights", "RingLowering"]


class KeptWeights:
    """Of all stages of a schedule; each rank gets a version at its own forward, and hands it on at once."""

    def __init__(self, schedule: Schedule, workers: WorkerWriter) -> None:
        self._schedule, self._workers = schedule, workers
        self._ways = [weight_path(schedule, stage) for stage in range(schedule.stages)]
        self._newest = [[0] * schedule.workers for _ in self._ways]  # version, by stage and worker

    def begin_step(self, step: int) -> None:
        """Nothing: what a step reads is brought when it does."""

    def made(self, stage: int, tick: int) -> None:
        """The owner has one version more."""
        self._has(stage, self._ways[stage][0], tick)

    def before(self, due: ScheduledAction) -> None:
        """A forward gets its weights; a backward has those of its forward."""
        if due.kind == "F":
            self._bring(due.stage, due.worker, self._schedule.version(due.place), due.tick)

    def after(self, due: ScheduledAction) -> None:
        """Nothing: they stay."""

    def rest(self, stage: int, version: int, tick: int) -> None:
        """Every rank gets it."""
        for worker in self._ways[stage]:
            self._bring(stage, worker, version, tick)

    def drain(self, steps: int, tick: int) -> None:
        """Nothing: every rank has the newest."""

    def _bring(self, stage: int, worker: int, version: int, tick: int) -> None:
        """Weights come from the worker before on their way."""
        way = self._ways[stage]
        while worker != way[0] and self._newest[stage][worker] < version:
            before = way[way.index(worker) - 1]
            message = StageMessage("weights", self._newest[stage][worker] + 1, before, stage)
            self._workers.takes("UNSHARD", worker, tick, message, before)
            self._has(stage, worker, tick)

    def _has(self, stage: int, worker: int, tick: int) -> None:
        """One version more is there, and goes to the next."""
        self._newest[stage][worker] += 1
        way, version = self._ways[stage], self._newest[stage][worker]
        for after in way[way.index(worker) + 1 :][:1]:
            self._workers.passes(StageMessage("weights", version, worker, stage), worker, after, tick)


class _Sum(NamedTuple):
    """A message that leaves at a tick, and who sends it to whom."""

    tick: int
    message: StageMessage
    sender: int
    receiver: int


class RingLowering:
    """Of all stages of a schedule. Told of every action of every rank, in the one order.

    Args:
        ranks: by worker of the schedule.

    Raises:
        ValueError: workers do not have one micro-batch and one rank each, or weights are wanted before the norm is
            known.
    """

    def __init__(self, schedule: Schedule, ranks: Sequence[int], clip: Clip | None, written: InstructionWriter) -> None:
        self._schedule, self._clip = schedule, clip
        self._workers = WorkerWriter(ranks, written)
        if len(set(ranks)) < schedule.workers:
            raise ValueError(
                f"schedule: {schedule.name} runs stages on several of the ranks {tuple(ranks)}, some of which run "
                f"several of its workers; want a rank for each, or one for all"
            )
        stages = range(schedule.stages)
        self._owners = [owner_of(schedule, stage) for stage in stages]
        self._sums = [sum_path(schedule, stage, clip) for stage in stages]
        self._closings = [closing(schedule, stage, clip) for stage in stages]
        self._weights: KeptWeights | LentWeights = KeptWeights(schedule, self._workers)
        if written.wires.lends:
            self._weights = LentWeights(schedule, clip, self._workers)
        self._hop = hop_ticks(schedule) if written.wires.lends else None
        self._leaving: list[_Sum] = []  # see Note [Late sums]
        self._newest = [0 for _ in stages]  # version, at the owner
        self._has_norms = clip is not None and clip.needs_all_stages
        self._known = [0] * schedule.workers  # steps whose norm is known, by worker
        self._actions = [
            {(one.kind, one.stage): place for place, one in enumerate(row)} for row in schedule.ticks
        ]  # numbers in a step

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""
        return frozenset(j for j, owner in enumerate(self._owners) if self._workers.is_here(owner))

    @property
    def passed(self) -> frozenset[int]:
        """None: every rank keeps buffers of its own."""
        return frozenset()

    @property
    def _last(self) -> int:
        return self._schedule.workers - 1

    def begin_step(self, step: int) -> None:
        """One more step is handed in."""
        self._weights.begin_step(step)

    def before(self, due: ScheduledAction) -> None:
        """Owners step whose time has come; an action gets its weights, which are handed on."""
        self._leave(due.tick)
        action = self._actions[due.worker][due.kind, due.stage]
        for stage, owner in enumerate(self._owners):
            made = self._closings[stage]
            if owner == due.worker and made.action == action:
                self._make(stage, due.step - made.steps, due.tick)
        self._weights.before(due)

    def after(self, due: ScheduledAction) -> None:
        """A backward's gradients join the sum."""
        if due.kind == "B":
            self._sum(due)
        self._weights.after(due)

    def _sum(self, due: ScheduledAction) -> None:
        worker, stage, path = due.worker, due.stage, self._sums[due.stage]
        if worker in path[1:]:
            above = StageMessage("partial gradient", due.step, worker - 1, stage)
            self._workers.takes("SUM", worker, due.tick, above, worker - 1)
        if worker in path[:-1]:
            needed = self._schedule.action("B", worker + 1, stage).start + due.step * self._schedule.period
            self._passes(StageMessage("partial gradient", due.step, worker, stage), worker + 1, due.tick, needed)
        elif worker == self._last:
            if self._has_norms:
                self._add_norm(due)
            needed = self._closings[stage].tick + (due.step + 1) * self._schedule.period
            self._passes(StageMessage("gradient", due.step, worker, stage), self._owners[stage], due.tick, needed)

    def end_step(self, steps: int) -> None:
        """Nothing: owners step at times of their own."""

    def rest(self, steps: int, tick: int) -> None:
        """Every owner makes the newest weights, version by version, and gets the norms; ranks get what stays there."""
        self._leave(None)
        for version in range(1, steps + 1):
            for stage in reversed(range(self._schedule.stages)):
                self._make(stage, version, tick)
                self._weights.rest(stage, version, tick)
        for owner in sorted(set(self._owners)) if self._has_norms else ():
            self._know(owner, steps, tick)

    def drain(self, steps: int, tick: int) -> None:
        """The next step begins with the newest weights."""
        self._weights.drain(steps, tick)

    def _add_norm(self, due: ScheduledAction) -> None:
        """On the last rank, which holds a whole sum; with the first stage's the norm is known there."""
        self._workers.does(due.worker, Instruction("NORM", due.tick, due.step, due.micro_batch, due.stage))
        if due.stage == 0:
            self._known[due.worker] += 1
            for owner in sorted({*self._owners} - {due.worker}):
                self._workers.passes(self._norm_for(owner, due.step), due.worker, owner, due.tick)

    def _norm_for(self, owner: int, step: int) -> StageMessage:
        return StageMessage("norm", step, NO_MICRO_BATCH, self._owners.index(owner))

    def _know(self, owner: int, steps: int, tick: int) -> None:
        while self._known[owner] < steps:
            self._workers.takes("RECV_NORM", owner, tick, self._norm_for(owner, self._known[owner]), self._last)
            self._known[owner] += 1

    def _make(self, stage: int, version: int, tick: int) -> None:
        """The owner steps with the gradients of step `version` - 1, if that is still to be done, and hands on."""
        owner = self._owners[stage]
        while (step := self._newest[stage]) < version:
            if self._clip is not None and self._has_norms:
                self._know(owner, step + int(self._clip.waits), tick)
            if owner != self._last:
                self._workers.takes("SUM", owner, tick, StageMessage("gradient", step, self._last, stage), self._last)
            self._workers.does(owner, Instruction("UPDATE", tick, step, self._last, stage))
            self._newest[stage] += 1
            self._weights.made(stage, tick)

    def _passes(self, message: StageMessage, receiver: int, tick: int, needed: int) -> None:
        """A sum leaves now, or when it is time; see Note [Late sums]."""
        leaves = tick if self._hop is None else max(tick, needed - self._hop)
        self._leaving.append(_Sum(leaves, message, message.micro_batch, receiver))
        self._leave(tick)

    def _leave(self, tick: int | None) -> None:
        """What is due by then, or all."""
        leaving, self._leaving = self._leaving, []
        for one in sorted(leaving):
            if tick is None or one.tick <= tick:
                self._workers.passes(one.message, one.sender, one.receiver, one.tick)
            else:
                self._leaving.append(one)
