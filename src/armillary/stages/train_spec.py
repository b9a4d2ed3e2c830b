"""What a run under a schedule is to do, the same for every process: schedule, loss, seed, recomputation, clipping.

Where a process sits among those that carry out one schedule: its rank, who runs what, how it reaches the others. Ranks
that carry out one schedule side by side take micro-batches of their own: data parallelism around a schedule. When a
stage's gradients of a step are complete here they are everywhere, in the order of the same table; their mean over the
ranks is a `Reducer`'s.

Which forward of each stage comes next here, by micro-batch: what it will read is kept until then.

The losses of training steps, put together as their micro-batches come in.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from armillary.plans.parcel import RankInfo
from armillary.plans.requests import Scope
from armillary.runtime.dense_unit import DenseUnit
from armillary.schedules.clipping import Clip
from armillary.schedules.corrections.correction import Correction
from armillary.schedules.edges import Codes
from armillary.schedules.instructions import Instruction
from armillary.schedules.method import Objective
from armillary.schedules.rank_list import Placement, Ranks, Residency, ScheduledAction
from armillary.schedules.schedule import Cell, Schedule
from armillary.stages.reducer import Reducer
from armillary.transport.requests import Channel, Requests

__all__ = [
    "LossBook",
    "NextForwards",
    "Observer",
    "StageContext",
    "StageReplicas",
    "StepLosses",
    "TrainSpec",
    "alone",
    "in_a_row",
    "side_by_side",
]


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


@dataclass(frozen=True, eq=False)
class StageContext:
    """
    Args:
        ranks: by worker of the schedule, or which of them runs what.
        channel: to the other ranks; None if all workers are here.
        replicas: the ranks that hold the same stages, with data of their own.
        one_queue: whether the channel has one for both directions of a pair, as NCCL has.
    """

    rank: int
    ranks: Ranks
    channel: Channel | None = None
    replicas: StageReplicas = field(default_factory=alone)
    one_queue: bool = False


def in_a_row(schedule: Schedule, rank: int, channel: Channel, one_queue: bool = False) -> StageContext:
    """A worker of the schedule a rank."""
    return StageContext(rank, range(schedule.workers), channel, one_queue=one_queue)


def side_by_side(schedule: Schedule, replicas: StageReplicas | None = None) -> StageContext:
    """All workers of the schedule in this process; its replicas do the same with data of their own."""
    replicas = replicas or alone()
    return StageContext(replicas.place.rank, [replicas.place.rank] * schedule.workers, replicas=replicas)


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


@dataclass(frozen=True, eq=False)
class StepLosses:
    """The losses of all micro-batches of one training step, in their order."""

    step: int
    losses: tuple[Tensor, ...]


class LossBook:
    """Open steps; a step is given out once, when its last loss is in."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._open: dict[int, dict[int, Tensor]] = {}

    def enter(self, step: int, micro_batch: int, loss: Tensor) -> None:
        self._open.setdefault(step, {})[micro_batch] = loss

    def complete(self) -> list[StepLosses]:
        """The steps that have become complete since the last call, in order."""
        steps = sorted(step for step, losses in self._open.items() if len(losses) == self._micro_batches)
        found = [(step, self._open.pop(step)) for step in steps]
        return [StepLosses(step, tuple(losses[m] for m in sorted(losses))) for step, losses in found]


Observer = Callable[[ScheduledAction | Instruction, int, Collection[Cell]], None]


def _ignore(due: ScheduledAction | Instruction, version: int, held: Collection[Cell]) -> None:
    """The observer that does not look."""


@dataclass(frozen=True)
class TrainSpec:
    """
    Args:
        loss: loss(output, target) -> scalar mean over one micro-batch.
        seed: with the place, fixes the random numbers of every stage of every micro-batch of every step.
        recompute: stages that keep only their input and run again before their backward.
        clip: of the mean gradient of every step.
        objectives: of the schedule's uncoupled stages, objective(module, output, target, loss) -> scalar mean over one
            micro-batch; `loss` is the one above.
        codes: of what crosses between stages.
        corrections: against stale weights, in the order in which they act.
        counted: tensors sent over coded edges, by what they are, the stage that made them, and whether they were coded;
            if not, it was in the warm-up. Filled as they leave.
        lends: whether only the owner of a stage keeps its weights, where several ranks run it.
        residency: of stages whose activations do not just stay between forward and backward.
        observe: told after every action what it was, the version of the weights it read, and the places held now.

    Raises:
        ValueError: a stage to recompute that the schedule does not have.
    """

    schedule: Schedule
    loss: Callable[[Any, Any], Tensor]
    seed: int = 0
    recompute: frozenset[int] = frozenset()
    clip: Clip | None = None
    observe: Observer = _ignore
    corrections: tuple[Correction, ...] = ()
    objectives: Mapping[int, Objective] = field(default_factory=dict)
    codes: Codes = field(default_factory=dict)
    counted: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    lends: bool = False
    residency: Mapping[int, Residency] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if {*self.objectives} != {*self.schedule.uncoupled}:
            raise ValueError(
                f"schedule: {self.schedule.name} has uncoupled stages {self.schedule.uncoupled}, and objectives for "
                f"{sorted(self.objectives)}; want one for each"
            )
        strange = [stage for stage in self.recompute if not 0 <= stage < self.schedule.stages]
        if strange:
            raise ValueError(f"schedule: cannot recompute stages {strange}; the schedule has {self.schedule.stages}")
