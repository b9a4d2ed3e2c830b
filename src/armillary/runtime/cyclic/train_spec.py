"""What a run under a schedule is to do, the same for every process: schedule, loss, seed, recomputation, clipping."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from armillary.schedules.action_queue import ScheduledAction
from armillary.schedules.clipping import Clip
from armillary.schedules.corrections.correction import Correction
from armillary.schedules.edge import Codes
from armillary.schedules.instruction import Instruction
from armillary.schedules.method import Objective
from armillary.schedules.schedule import Cell, Schedule

__all__ = ["Observer", "TrainSpec"]

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

    def __post_init__(self) -> None:
        if {*self.objectives} != {*self.schedule.uncoupled}:
            raise ValueError(
                f"schedule: {self.schedule.name} has uncoupled stages {self.schedule.uncoupled}, and objectives for "
                f"{sorted(self.objectives)}; want one for each"
            )
        strange = [stage for stage in self.recompute if not 0 <= stage < self.schedule.stages]
        if strange:
            raise ValueError(f"schedule: cannot recompute stages {strange}; the schedule has {self.schedule.stages}")
