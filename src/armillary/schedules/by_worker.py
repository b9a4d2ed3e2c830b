"""Every worker of a schedule on one rank: a pipeline, a ring, or all of them in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from armillary.schedules.chain import Chain
from armillary.schedules.clipping import Clip
from armillary.schedules.norm_in_time import refuse_in_pipeline, refuse_in_ring, refuse_on_one_device
from armillary.schedules.placement import Around, Placement, Ranks
from armillary.schedules.rank_list import RankList
from armillary.schedules.relay import Relay
from armillary.schedules.schedule import Cell, Schedule

__all__ = ["ByWorker", "placed"]


@dataclass(frozen=True, eq=False)
class ByWorker:
    """
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

    def around(self, clip: Clip | None, written: RankList, reduces: bool) -> Around:
        if self._is_spread:
            return Relay(self.schedule, self.workers, clip, written)
        return Chain(self.schedule, self.workers, clip, written, reduces)

    def refuse_late_norm(self, clip: Clip | None) -> None:
        if self._is_spread:
            refuse_in_ring(self.schedule, clip)
        elif len({rank for ranks in self._ranks for rank in ranks}) == 1:
            refuse_on_one_device(self.schedule, clip)
        else:
            refuse_in_pipeline(self.schedule, clip)

    @property
    def _is_spread(self) -> bool:
        """Whether a stage runs on several ranks."""
        return any(len(ranks) > 1 for ranks in self._ranks)


def placed(schedule: Schedule, ranks: Ranks) -> Placement:
    return ByWorker(schedule, tuple(ranks)) if isinstance(ranks, Sequence) else ranks
