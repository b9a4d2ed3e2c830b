"""What a `Run` asks of whatever carries a plan out, and what is to be trained, as data.

A moving average (`Average`) follows `torch.optim.swa_utils.get_ema_multi_avg_fn`: the first update copies, each later
one moves the average by 1 - decay towards the parameter. It is element-wise, so an owner averages its rows and asks
nobody. Those rows stand with their table (`RowTable.averages`), and are saved and loaded as its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.look_up import State
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import Table
from armillary.profiler.probe import Loss
from armillary.runtime.replica_checks import ReplicatedState
from armillary.session.data_check import FirstBatches
from armillary.session.traffic_meter import TrafficMeter
from armillary.stages.train_spec import StepLosses
from armillary.tables.build import WholeParameter
from armillary.tables.optimizer_state import Held
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = ["Average", "Job", "NamedTensor", "Pair", "TrainJob", "Watcher"]


class Watcher(Protocol):
    """Looks on while a loop takes its first steps."""

    def before_step(self, leaves_one: bool) -> None:
        """leaves_one: whether the step before is over now, in which another optimizer rested."""

    def after_step(self, loop: Any, is_complete: bool) -> "Watcher | None":
        """Who looks on from now on: itself, another, or nobody.

        Args:
            is_complete: every optimizer has stepped, and every rank is after the same step.
        """

    def loaded(self, loop: Any, saved_plan: Mapping[str, Any], name: str) -> "Watcher | None":
        """The same, after a checkpoint was loaded that was saved under this plan (as JSON; empty if nobody knows).

        Args:
            name: of the checkpoint, for the user.
        """

    def stop(self) -> None:
        """At once; nothing of it is left."""


@dataclass(frozen=True, eq=False)
class TrainJob:
    """loss, example: None where the user's own loop takes the loss. seed, first_step: of random numbers (see `attach`).
    scaler: the loop's GradScaler, if it has one. check_data: whether ranks must not train on the same data.
    broadcast_buffers: whether rank 0's buffers reach all ranks. watcher: of a loop whose plan, or its forecast, is to
    come. profile, topology: what the plan was made from, where that is known. check_finite: whether a gradient that is
    not finite ends the step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss | None = None
    example: Any = None
    seed: int = 0
    first_step: int = 0
    scaler: Any = None
    check_data: bool = True
    broadcast_buffers: bool = True
    watcher: Watcher | None = None
    profile: Profile | None = None
    topology: Topology | None = None
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.check_finite and self.scaler is not None and self.scaler.is_enabled():
            raise ValueError(
                "check_finite=True: a GradScaler meets gradients that are not finite and skips their step; give one of "
                "the two"
            )

    @property
    def options(self) -> dict[str, Any]:
        """Those that ranks must give alike."""
        return {
            "check_data": self.check_data,
            "broadcast_buffers": self.broadcast_buffers,
            "check_finite": self.check_finite,
        }


class Pair(NamedTuple):
    """table: None of a parameter that every rank holds whole."""

    average: Tensor
    value: Tensor
    table: RowTable | None = None


@dataclass(eq=False)
class Average:
    """Of all parameters of a model, trained or not. updates: made so far. whole: by name, of parameters that are no
    tables. is_shown: the model holds the averages, and these the model's values."""

    decay: float
    updates: int = 0
    whole: dict[str, Tensor] = field(default_factory=dict)
    is_shown: bool = False

    @property
    def key(self) -> str:
        """Its name in a checkpoint and with tables."""
        return repr(self.decay)

    @torch.no_grad()
    def begin(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        """From the parameters as they are."""
        self.updates = 0
        values = {name: p.detach().clone() for name, p in model.named_parameters() if name not in tables}
        self.whole = values
        for table in tables.values():
            table.averages[self.key] = table.shard.detach().clone()

    def whole_of(self, tables: Mapping[str, RowTable]) -> dict[str, Tensor]:
        """Those of parameters that are no tables, by name."""
        for name, table in tables.items():
            if self.key not in table.averages:  # it has become a table since
                table.averages[self.key] = table.part_of(self.whole.pop(name)).clone()
        return self.whole

    def pairs(self, model: nn.Module, tables: Mapping[str, RowTable]) -> list[Pair]:
        """What this rank holds of every average, and of what it is one."""
        whole = self.whole_of(tables)
        found = [Pair(table.averages[self.key], table.shard, table) for table in tables.values()]
        parameters = [(name, p) for name, p in model.named_parameters() if name not in tables]
        return [*found, *(Pair(whole[name], p.detach()) for name, p in parameters)]

    @torch.no_grad()
    def update(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        for average, value, _ in self.pairs(model, tables):
            if self.updates == 0:
                average.copy_(value)
            elif average.is_floating_point() or average.is_complex():
                average.lerp_(value, 1 - self.decay)
            else:
                average.copy_(average * self.decay + value * (1 - self.decay))
        self.updates += 1

    @torch.no_grad()
    def swap(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        """Averages go into the model, its values come here; and back."""
        for average, value, table in self.pairs(model, tables):
            if table is None:
                kept = value.clone()
                value.copy_(average)
                average.copy_(kept)
            else:
                table.swap_rows(average)
        self.is_shown = not self.is_shown


class NamedTensor(NamedTuple):
    """Held for a parameter."""

    parameter: str
    tensor: Any


Item = TypeVar("Item")


class Job(Protocol):
    """This process's part. tables, held: the rows owned here, and optimizer state of those seen through a window.
    names: of the user's parameters in the optimizer, in its order."""

    job: TrainJob
    plan: Plan
    traffic_meter: TrafficMeter
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
    def coded(self) -> Sequence[tuple[bool, ...]]: ...

    @property
    def held(self) -> Mapping[str, Held]: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the model's parameters, whole, by every name that they have."""

    def step(self, batches: Sequence[Any]) -> list[StepLosses]: ...

    @property
    def deal(self) -> Callable[[], Callable[[], int]] | None:
        """Begins an epoch whose batches are dealt to whoever asks, by their numbers; None: each rank has its share."""

    def tables_of_report(self) -> Sequence[Table]:
        """Collective: what only this kind of run has to report."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    def weigh(self, weight: float) -> None: ...

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]: ...

    def serve(self, state: State = "aside") -> None:
        """Serves look-ups of other ranks until all are in a call that all make between two steps. Collective."""

    def alike(self) -> ReplicatedState:
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

    def as_it_was(self) -> AbstractContextManager[None]:
        """Inside, what the user changed since the run began, and steps would refuse, is set aside."""

    def reloading(self, saved_plan: Mapping[str, Any], name: str) -> AbstractContextManager[None]:
        """Collective. Inside, model, optimizer, `tables` and `held` take the values of a checkpoint of this name, which
        was saved under this plan; behind it the run goes on from them."""

    @property
    def hooks(self) -> ExitStack:
        """Closed, it takes off all that hangs on model, optimizer and scaler; asks nobody."""

    def whole(self, gather: bool) -> Mapping[str, WholeParameter]:
        """Collective, after `finish`, before the hooks go: parameters that do not hold their newest values here, or are
        held by the optimizer in another's place. gather: whether tables are among them."""

    def count(self) -> None:
        """Brings the tally up to date."""

    def held_tensors(self) -> Iterator[NamedTensor]:
        """What is held between two steps on this rank: weights, optimizer state, gradients that cross. What is no
        tensor is left out."""

    def beside_bytes(self) -> Mapping[str, float]:
        """By group: what is held beside those, as far as it is not of one tensor."""
