"""A schedule lowered to one rank's list of instructions, call by call: a step handed in, or the rest worked off.

Note [One order]. All ranks walk through the same actions of all workers, in the order of the schedule's clock
(`ActionQueue`). A rank's list is what of that concerns it; room for a message is made where its sender sends it. So two
ranks name their sends and receives in one and the same order, both directions together: a queue that NCCL can carry as
it stands. What an action waits for has an earlier place in that order, so nobody waits in a circle, whichever rules a
message moves by. A step ends at the same tick for all, so that a rank that leaves a call has left nobody waiting in it.
Where steps do not overlap, it waits at the end until what it sent is there: a script may end after any of its steps.

What goes from rank to rank around the actions the placement says (`Placement`): `lower_pipeline.py`, where a stage
runs on one rank, `lower_ring.py`, where it runs on several, `lower_shared_stages.py`, where micro-batches take turns.

Every worker of a schedule on one rank: a pipeline, a ring, or all of them in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import Instruction
from armillary.schedules.lower_pipeline import PipelineLowering
from armillary.schedules.lower_ring import RingLowering
from armillary.schedules.rank_list import (
    ONE_QUEUE,
    ActionQueue,
    ChannelRules,
    Communication,
    InstructionWriter,
    Placement,
    Ranks,
    ScheduledAction,
)
from armillary.schedules.routes import owner_of, refuse_in_pipeline, refuse_in_ring, refuse_on_one_device
from armillary.schedules.schedule import Cell, Schedule

__all__ = ["ByWorker", "Lowering", "placed"]


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

    def owner(self, stage: int) -> int:
        return self.workers[owner_of(self.schedule, stage)] if self._is_spread else self._ranks[stage][0]

    def older(self, stage: int) -> int:
        """One at the owner; a worker of a ring gets new weights when it reads them."""
        ages = [ages[stage] for ages in self.schedule.staleness]
        return ages[owner_of(self.schedule, stage)] if self._is_spread else int(any(ages))

    @cached_property
    def _ranks(self) -> list[list[int]]:
        runs = {(a.stage, rank) for row, rank in zip(self.schedule.ticks, self.workers, strict=True) for a in row}
        return [sorted(rank for j, rank in runs if j == stage) for stage in range(self.schedule.stages)]

    def handed_in(self, rank: int) -> Sequence[int]:
        here = (row for row, own in zip(self.schedule.ticks, self.workers, strict=True) if own == rank)
        return sorted({action.micro_batch for row in here for action in row})

    def rotation(self, stage: int) -> int:
        return 1

    def around(self, clip: Clip | None, written: InstructionWriter, reduces: bool) -> Communication:
        if self._is_spread:
            return RingLowering(self.schedule, self.workers, clip, written)
        return PipelineLowering(self.schedule, self.workers, clip, written, reduces)

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


class Lowering:
    """
    Args:
        rank: whose list. ranks: by worker of the schedule.
        clip: with a norm over all stages, their squares travel.
        reduces: whether gradients are averaged over the ranks that hold the same stages, with data of their own.
        wires: how messages travel.

    Raises:
        ValueError: a stage runs on several ranks, but they do not have one micro-batch each.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ranks: Ranks,
        clip: Clip | None = None,
        reduces: bool = False,
        wires: ChannelRules = ONE_QUEUE,
    ) -> None:
        self.schedule, self.rank, self.steps = schedule, rank, 0
        self._where = placed(schedule, ranks)
        self._written = InstructionWriter(rank, wires)
        self._around = self._where.around(clip, self._written, reduces)
        self.is_lent = wires.lends and any(len(self._where.ranks(stage)) > 1 for stage in range(schedule.stages))
        self._queue = ActionQueue(schedule, range(schedule.workers))

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""
        return self._around.owned

    @property
    def passed(self) -> frozenset[int]:
        """The stages whose buffers go from rank to rank."""
        return self._around.passed

    @property
    def lends(self) -> frozenset[int]:
        """Of these, the stages whose weights other ranks borrow."""
        return self.owned if self.is_lent else frozenset()

    @property
    def borrowed(self) -> frozenset[int]:
        """The stages whose weights come to this rank for one action at a time."""
        return frozenset(range(self.schedule.stages)) - self.owned if self.is_lent else frozenset()

    def next_step(self) -> list[Instruction]:
        """What is to be done when one more step is handed in."""
        self.steps += 1
        self._around.begin_step(self.steps - 1)
        for due in self._queue.next_step():
            self._walk(due)
        self._around.end_step(self.steps)
        if not self.schedule.overlaps:
            self._written.see_all_over()
        return self._written.taken()

    def rest(self) -> list[Instruction]:
        """What is left of the steps handed in so far."""
        self._finish()
        self._written.see_all_over()
        return self._written.taken()

    def drain(self) -> list[Instruction]:
        """The same, and what went ahead for the next step is thrown away: it will read the newest weights."""
        self._finish()
        self._around.drain(self.steps, self.steps * self.schedule.period)
        self._written.see_all_over()
        return self._written.taken()

    def _finish(self) -> None:
        for due in self._queue.rest():
            self._walk(due)
        self._around.rest(self.steps, self.steps * self.schedule.period)

    def _walk(self, due: ScheduledAction) -> None:
        """One action of any worker."""
        is_here = self._where.rank_of(due.place) == self.rank
        if is_here:
            self._written.begin()
        self._around.before(due)
        if is_here:
            self._written.act(due)
        self._around.after(due)
