"""Which rank runs which stage of which micro-batch of which step: a schedule has workers, a run has ranks.

Mostly a worker of the schedule is a rank, or all of them are one. Where a stage's micro-batches take turns on ranks of
its own, the rank changes with the step (`shared.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from armillary.schedules.schedule import Cell, Schedule
from armillary.schedules.shared import Sharing

__all__ = ["ByWorker", "Placement", "Ranks", "is_relayed", "placed"]


class Placement(Protocol):
    def rank_of(self, place: Cell) -> int:
        """The rank that runs this stage for this micro-batch of this step, both ways."""

    def ranks(self, stage: int) -> Sequence[int]:
        """Those that run a stage."""

    def handed_in(self, rank: int) -> Sequence[int]:
        """The micro-batches of a step that are handed in on a rank."""

    def rotation(self, stage: int) -> int:
        """After how many steps the micro-batches of a step meet the same ranks again."""


Ranks = Sequence[int] | Sharing  # by worker of the schedule, where each stays on its rank


@dataclass(frozen=True, eq=False)
class ByWorker:
    """Every worker of the schedule is on one rank.

    Args:
        workers: their ranks.
    """

    schedule: Schedule
    workers: tuple[int, ...]

    def rank_of(self, place: Cell) -> int:
        return self.workers[self.schedule.worker_of(place[1], place[2])]

    def ranks(self, stage: int) -> Sequence[int]:
        return self._ranks[stage]

    @cached_property
    def _ranks(self) -> list[list[int]]:
        runs = {(a.stage, rank) for row, rank in zip(self.schedule.ticks, self.workers, strict=True) for a in row}
        return [sorted(rank for j, rank in runs if j == stage) for stage in range(self.schedule.stages)]

    def handed_in(self, rank: int) -> Sequence[int]:
        here = (row for row, own in zip(self.schedule.ticks, self.workers, strict=True) if own == rank)
        return sorted({action.micro_batch for row in here for action in row})

    def rotation(self, stage: int) -> int:
        return 1


def placed(schedule: Schedule, ranks: Ranks) -> Placement:
    return ByWorker(schedule, tuple(ranks)) if isinstance(ranks, Sequence) else ranks


def is_relayed(schedule: Schedule, ranks: Ranks) -> bool:
    """Whether a stage runs on several ranks."""
    where = placed(schedule, ranks)
    return any(len(where.ranks(stage)) > 1 for stage in range(schedule.stages))
