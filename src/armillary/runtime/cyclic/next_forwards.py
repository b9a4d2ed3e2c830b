"""Which forward of each stage comes next here, by micro-batch: what it will read is kept until then."""

from collections.abc import Collection, Iterable

from armillary.schedules.placement import Placement
from armillary.schedules.schedule import Cell

__all__ = ["NextForwards"]


class NextForwards:
    """
    Args:
        stages: that run here. micro_batches: that are handed in here.
    """

    def __init__(self, where: Placement, rank: int, stages: Iterable[int], micro_batches: Collection[int]) -> None:
        self._where = where
        self._steps: dict[int, dict[int, int]] = {j: {} for j in stages}  # by stage and micro-batch
        for j, steps in self._steps.items():
            for place in ((step, m, j) for step in range(where.rotation(j)) for m in micro_batches):
                if where.rank_of(place) == rank:
                    steps.setdefault(place[1], place[0])

    def begun(self, place: Cell) -> None:
        step, micro_batch, j = place
        self._steps[j][micro_batch] = step + self._where.rotation(j)

    def of(self, stage: int) -> list[Cell]:
        return [(step, micro_batch, stage) for micro_batch, step in self._steps[stage].items()]

    @property
    def first_step(self) -> int:
        """Of which a forward is still to come here."""
        return min((step for steps in self._steps.values() for step in steps.values()), default=0)
