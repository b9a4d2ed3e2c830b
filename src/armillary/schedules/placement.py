"""Which rank runs which stage of which micro-batch of which step, and what goes from rank to rank around that.

A schedule has workers, a run has ranks. Mostly a worker is a rank, or all of them are one (`by_worker.py`); a
schedule's file may place them otherwise. A placement says itself what crosses because of it, so nobody who lowers or
carries out a schedule asks which placement it is.
"""

from collections.abc import Sequence
from typing import Protocol

from armillary.schedules.action_queue import ScheduledAction
from armillary.schedules.clipping import Clip
from armillary.schedules.rank_list import RankList
from armillary.schedules.schedule import Cell

__all__ = ["Around", "Placement", "Ranks"]


class Around(Protocol):
    """What one rank does around actions: letters, sums, optimizer steps. Told of every action, in the one order."""

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""

    @property
    def passed(self) -> frozenset[int]:
        """The stages whose buffers go from rank to rank."""

    def begin_step(self, step: int) -> None:
        """One more step is handed in."""

    def before(self, due: ScheduledAction) -> None:
        """What an action needs."""

    def after(self, due: ScheduledAction) -> None:
        """What the action has made."""

    def end_step(self, steps: int) -> None:
        """So many steps were handed in, and all that can be done without a later one."""

    def rest(self, steps: int, tick: int) -> None:
        """All actions are done: every owner makes the newest weights."""

    def drain(self, steps: int, tick: int) -> None:
        """After that: the next step begins with them."""


class Placement(Protocol):
    def rank_of(self, place: Cell) -> int:
        """The rank that runs this stage for this micro-batch of this step, both ways."""

    def ranks(self, stage: int) -> Sequence[int]:
        """Those that run a stage."""

    def handed_in(self, rank: int) -> Sequence[int]:
        """The micro-batches of a step that are handed in on a rank."""

    def rotation(self, stage: int) -> int:
        """After how many steps the micro-batches of a step meet the same ranks again."""

    def around(self, clip: Clip | None, written: RankList, reduces: bool) -> Around:
        """
        Args:
            written: the list of the rank in question.
            reduces: whether gradients are averaged over the ranks that hold the same stages, with data of their own.
        """

    def refuse_late_norm(self, clip: Clip | None) -> None:
        """
        Raises:
            ValueError: weights are read before the norm can be known where they are made.
        """


Ranks = Sequence[int] | Placement  # by worker of the schedule, where each stays on its rank
