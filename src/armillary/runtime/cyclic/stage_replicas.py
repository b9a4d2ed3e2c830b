"""Ranks that carry out one schedule side by side, each on micro-batches of its own: data parallelism around a schedule.

When a stage's gradients of a step are complete here they are everywhere, in the order of the same table; their mean
over the ranks is a `Reducer`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from armillary.exchanges.exchange import RankInfo
from armillary.facts.collectives import Scope
from armillary.runtime.channel import Requests
from armillary.runtime.cyclic.reducer import Reducer
from armillary.runtime.hybrid.dense_unit import DenseUnit

__all__ = ["StageReplicas", "alone"]


@dataclass(frozen=True, eq=False)
class StageReplicas:
    """
    Args:
        place: of this rank among them. requests: to the others; None if there are none. scope: that names them.
        groups: by stage, in the plan's order; each holds parameters of one dtype.
    """

    place: RankInfo
    requests: Requests | None = None
    scope: Scope = "world"
    groups: Mapping[int, Sequence[DenseUnit]] = field(default_factory=dict)

    @property
    def reduces(self) -> bool:
        """Whether gradients cross: to others, or what an exchange kept of earlier ones arrives here."""
        units = (unit for those in self.groups.values() for unit in those)
        return self.place.workers > 1 or any(unit.exchange.is_guarded for unit in units)

    def reducer(self, stage: int, is_late: bool) -> Reducer:
        """Of the stage's gradients.

        Args:
            is_late: whether a step's mean is wanted only when the next step's gradients are there.
        """
        assert self.requests is not None
        units = self.groups.get(stage, ())
        for unit in units if is_late else ():
            unit.double()
        return Reducer(units, self.place, self.requests, self.scope)


def alone() -> StageReplicas:
    """One rank."""
    return StageReplicas(RankInfo(0, 1))
