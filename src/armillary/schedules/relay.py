"""Stages that several ranks run, each for a micro-batch of its own: sums and weights go from rank to rank.

A rank joins its gradients of a stage to the sum from the rank before (`SUM`) and hands it on; the last hands the
whole to the stage's owner, one more hop. The owner steps the optimizer (`UPDATE`) and hands the new weights to the
first rank that reads them, that one to the next, each at its own forward (`UNSHARD`). Who owns what, when an owner
steps, and which way all this goes is said in `messages.py`.

Note [Norms]. The last rank makes every sum, so it knows the norm over all stages after its last backward, and tells
every other owner.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism).
"""

from collections.abc import Sequence

from armillary.schedules.agenda import Due
from armillary.schedules.clipping import Clip
from armillary.schedules.instruction import NO_MICRO_BATCH, Instruction, Letter, Op
from armillary.schedules.messages import closing, home, sum_path, weight_path
from armillary.schedules.rank_list import RankList
from armillary.schedules.schedule import Schedule

__all__ = ["Relay"]


class Relay:
    """Of all stages of a schedule. Told of every action of every rank, in the one order.

    Args:
        ranks: by worker of the schedule.

    Raises:
        ValueError: workers do not have one micro-batch and one rank each, or weights are wanted before the norm is
            known.
    """

    def __init__(self, schedule: Schedule, ranks: Sequence[int], clip: Clip | None, written: RankList) -> None:
        self._schedule, self._ranks, self._clip, self._written = schedule, ranks, clip, written
        if len(set(ranks)) < schedule.workers:
            raise ValueError(
                f"schedule: {schedule.name} runs stages on several of the ranks {tuple(ranks)}, some of which run "
                f"several of its workers; want a rank for each, or one for all"
            )
        stages = range(schedule.stages)
        self._owners = [home(schedule, stage) for stage in stages]
        self._ways = [weight_path(schedule, stage) for stage in stages]
        self._sums = [sum_path(schedule, stage, clip) for stage in stages]
        self._closings = [closing(schedule, stage, clip) for stage in stages]
        self._newest = [[0] * schedule.workers for _ in stages]  # version, by stage and worker
        self._has_norms = clip is not None and clip.needs_all_stages
        self._known = [0] * schedule.workers  # steps whose norm is known, by worker
        self._actions = [
            {(one.kind, one.stage): place for place, one in enumerate(row)} for row in schedule.ticks
        ]  # numbers in a step

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""
        return frozenset(j for j, owner in enumerate(self._owners) if self._ranks[owner] == self._written.rank)

    @property
    def _last(self) -> int:
        return self._schedule.workers - 1

    def before(self, due: Due) -> None:
        """Owners step whose time has come; a forward gets its weights, which are handed on."""
        action = self._actions[due.worker][due.kind, due.stage]
        for stage, owner in enumerate(self._owners):
            made = self._closings[stage]
            if owner == due.worker and made.action == action:
                self._make(stage, due.step - made.steps, due.tick)
        if due.kind == "F":
            self._bring(due.stage, due.worker, self._schedule.version(due.place), due.tick)

    def after(self, due: Due) -> None:
        """A backward is done."""
        if due.kind == "F":
            return
        worker, stage, path = due.worker, due.stage, self._sums[due.stage]
        if worker in path[1:]:
            above = Letter("partial gradient", due.step, worker - 1, stage)
            self._do("SUM", worker, due.tick, above, worker - 1)
        if worker in path[:-1]:
            self._passes(Letter("partial gradient", due.step, worker, stage), worker, worker + 1, due.tick)
        elif worker == self._last:
            if self._has_norms:
                self._add_norm(due)
            self._passes(Letter("gradient", due.step, worker, stage), worker, self._owners[stage], due.tick)

    def end_step(self, steps: int) -> None:
        """Nothing: owners step at times of their own."""

    def rest(self, steps: int, tick: int) -> None:
        """Every rank gets the newest weights of every stage, version by version, and every owner the norms."""
        for version in range(1, steps + 1):
            for stage in reversed(range(self._schedule.stages)):
                self._make(stage, version, tick)
                for worker in self._ways[stage]:
                    self._bring(stage, worker, version, tick)
        for owner in sorted(set(self._owners)) if self._has_norms else ():
            self._know(owner, steps, tick)

    def _add_norm(self, due: Due) -> None:
        """On the last rank, which holds a whole sum; with the first stage's the norm is known there."""
        if self._ranks[due.worker] == self._written.rank:
            self._written.add(Instruction("NORM", due.tick, due.step, due.micro_batch, due.stage))
        if due.stage == 0:
            self._known[due.worker] += 1
            for owner in sorted({*self._owners} - {due.worker}):
                self._passes(self._norm_for(owner, due.step), due.worker, owner, due.tick)

    def _norm_for(self, owner: int, step: int) -> Letter:
        return Letter("norm", step, NO_MICRO_BATCH, self._owners.index(owner))

    def _know(self, owner: int, steps: int, tick: int) -> None:
        while self._known[owner] < steps:
            self._do("KNOW", owner, tick, self._norm_for(owner, self._known[owner]), self._last)
            self._known[owner] += 1

    def _make(self, stage: int, version: int, tick: int) -> None:
        """The owner steps with the gradients of step `version` - 1, if that is still to be done, and hands on."""
        owner = self._owners[stage]
        while (step := self._newest[stage][owner]) < version:
            if self._clip is not None and self._has_norms:
                self._know(owner, step + int(self._clip.waits), tick)
            if owner != self._last:
                self._do("SUM", owner, tick, Letter("gradient", step, self._last, stage), self._last)
            if self._ranks[owner] == self._written.rank:
                self._written.add(Instruction("UPDATE", tick, step, self._last, stage))
            self._has(stage, owner, tick)

    def _bring(self, stage: int, worker: int, version: int, tick: int) -> None:
        """Weights come from the worker before on their way."""
        way = self._ways[stage]
        while worker != way[0] and self._newest[stage][worker] < version:
            before = way[way.index(worker) - 1]
            letter = Letter("weights", self._newest[stage][worker] + 1, before, stage)
            self._do("UNSHARD", worker, tick, letter, before)
            self._has(stage, worker, tick)

    def _has(self, stage: int, worker: int, tick: int) -> None:
        """One version more is there, and goes to the next."""
        self._newest[stage][worker] += 1
        way, version = self._ways[stage], self._newest[stage][worker]
        for after in way[way.index(worker) + 1 :][:1]:
            self._passes(Letter("weights", version, worker, stage), worker, after, tick)

    def _do(self, op: Op, worker: int, tick: int, letter: Letter, sender: int) -> None:
        """What a worker does with a letter."""
        rank, peer = self._ranks[worker], self._ranks[sender]
        if rank == self._written.rank:
            place = letter.step, letter.micro_batch, letter.stage
            self._written.add(Instruction(op, tick, *place, letter, peer))
        self._written.reads(letter, peer, rank, tick)

    def _passes(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        self._written.passes(letter, self._ranks[sender], self._ranks[receiver], tick)
