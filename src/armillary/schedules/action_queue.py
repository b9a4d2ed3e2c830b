"""What is still to be done: the actions of the steps handed in so far, in the order of a schedule.

Steps overlap: some of a step's backwards come after forwards of the next. Within a tick backwards come before
forwards, so that memory is freed first, then workers in order, so that gradients are summed in worker order.
"""

import heapq
from collections.abc import Collection, Iterator
from typing import NamedTuple

from armillary.schedules.action import Kind
from armillary.schedules.schedule import Cell, Schedule

__all__ = ["ActionQueue", "ScheduledAction"]


class ScheduledAction(NamedTuple):
    """An action of a certain step; sorts in the order of execution."""

    tick: int
    turn: int  # 0 for backwards, 1 for forwards
    worker: int
    step: int
    micro_batch: int
    stage: int

    @property
    def kind(self) -> Kind:
        return "F" if self.turn else "B"

    @property
    def place(self) -> Cell:
        return self.step, self.micro_batch, self.stage


class ActionQueue:
    """The actions of some workers of a schedule, step by step.

    Args:
        in_step_with: a step ends where theirs does; where the workers themselves end it, if not said.
    """

    def __init__(self, schedule: Schedule, workers: Collection[int], in_step_with: Collection[int] = ()) -> None:
        self._schedule, self._workers = schedule, sorted(workers)
        self._waiting: list[ScheduledAction] = []
        self._steps = 0
        self._first = min(row[0].start for worker in in_step_with or workers if (row := schedule.ticks[worker]))

    def next_step(self) -> Iterator[ScheduledAction]:
        """Adds one step and yields what is due before the step after it begins."""
        for worker in self._workers:
            for action in self._schedule.ticks[worker]:
                tick = action.start + self._steps * self._schedule.period
                turn = int(action.kind == "F")
                heapq.heappush(
                    self._waiting, ScheduledAction(tick, turn, worker, self._steps, action.micro_batch, action.stage)
                )
        self._steps += 1
        yield from self._until(self._first + self._steps * self._schedule.period)

    def rest(self) -> Iterator[ScheduledAction]:
        """Yields all that is left of the steps added so far."""
        yield from self._until(None)

    def _until(self, tick: int | None) -> Iterator[ScheduledAction]:
        while self._waiting and (tick is None or self._waiting[0].tick < tick):
            yield heapq.heappop(self._waiting)
