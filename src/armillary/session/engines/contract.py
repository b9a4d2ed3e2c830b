"""What an engine of a schedule that owns the loop is made of, and what it can do."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from armillary.facts.plan import Plan
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.train_spec import TrainSpec
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.partition.stages import Stage
from armillary.runtime.transport import Transport
from armillary.schedules.method import ScheduleOptions
from armillary.session.cyclic.counted_channel import CountedChannel
from armillary.session.edges_at_eval import CodedLeaves
from armillary.session.train_job import TrainJob
from armillary.session.workload import Batch

__all__ = ["Engine", "Given", "Parts"]

Given = tuple[Any, Batch]  # what the first stage reads of a micro-batch, and what the loss wants


@dataclass(frozen=True, eq=False)
class Parts:
    """
    Args of note:
        stages: the model, cut. A schedule that does not cut has it and its loss as one, without a loss it alone.
        input_of: what the first stage reads of a batch.
        coded: what evaluation codes, as training does.
        is_traced: whether stages come from a trace of the model, which fixes the mode of every module.
    """

    plan: Plan
    options: ScheduleOptions
    job: TrainJob
    transport: Transport
    channel: CountedChannel
    stages: Sequence[Stage]
    spec: TrainSpec
    input_of: Callable[[Batch], Any]
    coded: CodedLeaves = ()
    is_traced: bool = False

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    def given(self, batches: Sequence[Batch]) -> list[Given]:
        return [(self.input_of(batch), batch) for batch in batches]


class Engine(Protocol):
    """Every process makes the same calls. Complete when constructed."""

    def given(self, batches: Sequence[Batch]) -> Sequence[Given]:
        """Of the micro-batches of this process, for `step`. Refuses what cannot be stepped on; begins nothing."""

    def step(self, given: Sequence[Given]) -> list[StepLosses]:
        """One training step; the losses known by now."""

    def settle(self) -> list[StepLosses]:
        """Finishes what is under way; training goes on as if nobody had asked."""

    def drain(self) -> list[StepLosses]:
        """Settles, and the next step reads the newest weights everywhere, as the first did."""

    def newest(self) -> AbstractContextManager[None]:
        """When everything is settled. Inside, the whole model holds the newest weights."""

    def detach(self) -> None:
        """Takes its hooks off; asks nobody."""

    @property
    def teller(self) -> int | None:
        """The process that knows a step's losses; None where each knows those of its own micro-batches."""

    def alike(self) -> Mapping[str, Tensor]:
        """When everything is settled: the parameters here, by name, that other processes hold as this one does."""

    @property
    def units(self) -> Sequence[DenseUnit]:
        """Groups that cross by exchanges, which may keep something for each rank."""

    @property
    def beside_bytes(self) -> float:
        """What it holds between steps besides weights and optimizer state."""
