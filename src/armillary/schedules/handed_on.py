"""Weights that stay where they have come: the owner hands each version to the first rank that reads it, that one on."""

from armillary.schedules.action_queue import ScheduledAction
from armillary.schedules.instruction import Letter
from armillary.schedules.messages import weight_path
from armillary.schedules.schedule import Schedule
from armillary.schedules.workers_list import WorkersList

__all__ = ["HandedOn"]


class HandedOn:
    """Of all stages of a schedule; each rank gets a version at its own forward, and hands it on at once."""

    def __init__(self, schedule: Schedule, workers: WorkersList) -> None:
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
            letter = Letter("weights", self._newest[stage][worker] + 1, before, stage)
            self._workers.takes("UNSHARD", worker, tick, letter, before)
            self._has(stage, worker, tick)

    def _has(self, stage: int, worker: int, tick: int) -> None:
        """One version more is there, and goes to the next."""
        self._newest[stage][worker] += 1
        way, version = self._ways[stage], self._newest[stage][worker]
        for after in way[way.index(worker) + 1 :][:1]:
            self._workers.passes(Letter("weights", version, worker, stage), worker, after, tick)
