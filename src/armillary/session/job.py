"""What carries a plan out, whatever its schedule: what a `Run` and all that it calls ask of it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.look_up import State
from armillary.facts.plan import Forecast, Plan
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.hybrid.drift import HeldAlike
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport
from armillary.session.average import Average
from armillary.session.first_batches import FirstBatches
from armillary.session.tally import Tally
from armillary.session.train_job import TrainJob

__all__ = ["Job"]

Item = TypeVar("Item")


class Job(Protocol):
    """This process's part. tables, held: the rows owned here, and optimizer state of those seen through a window.
    names: of the user's parameters in the optimizer, in its order."""

    job: TrainJob
    plan: Plan
    tally: Tally
    first: FirstBatches
    averages: dict[str, Average]  # moving ones, by their keys

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def rank(self) -> int: ...

    @property
    def workers(self) -> int: ...

    @property
    def tables(self) -> Mapping[str, RowTable]: ...

    @property
    def held(self) -> Mapping[str, Held]: ...

    @property
    def names(self) -> list[str]: ...

    def step(self, batches: Sequence[Any]) -> list[StepLosses]: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def weigh(self, weight: float) -> None: ...

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]: ...

    def serve(self, state: State = "aside") -> None:
        """Serves look-ups of other ranks until all are in a call that all make between two steps. Collective."""

    def alike(self) -> HeldAlike:
        """Between two steps, collective: finishes what is under way. What other ranks should hold as this one does; all
        that the plan lets differ is left out."""

    def settle(self) -> None:
        """Finishes what is under way; training goes on as if nobody had asked. Collective."""

    def drained(self) -> list[StepLosses]:
        """Ends what is under way, as part of the schedule; the losses that nobody was given yet. Collective."""

    @property
    def not_whole(self) -> str:
        """Why the model does not hold the newest weights, alike on every rank, between two steps; empty if it does."""

    def keep_up(self) -> None:
        """Collective: from here on nothing of a step is under way when its optimizer has stepped."""

    def newest(self) -> AbstractContextManager[None]:
        """Inside, the model holds the newest weights. Collective."""

    def finish(self, state: State = "finished") -> None:
        """Waits for all ranks to be so far, and serves them meanwhile."""

    @property
    def units(self) -> Sequence[Any]:
        """Groups whose exchange may keep something for each rank."""

    def rest(self) -> AbstractContextManager[dict[str, Any]]:
        """Between two steps, collective. Inside, what is not cut by row or by rank: "model", a state_dict without
        tables, and "optimizer", by name; not copied. Where replicas differ, their mean."""

    def undo(self, gather: bool) -> None:
        """Collective, after `finish`: model and optimizer are plain again. gather: whether whole tables come back."""

    def give_up(self, why: str) -> None:
        """Stops at once; asks nobody."""

    def count(self) -> None:
        """Brings the tally up to date."""

    def forecasts(self) -> list[tuple[str, str, Forecast]]:
        """What can be compared with what was measured: a name, its way, the forecast."""

    def held_bytes(self) -> dict[str, float]:
        """By the same names: what is held between two steps on this rank."""
