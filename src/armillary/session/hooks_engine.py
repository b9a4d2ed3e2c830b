"""Carries out a plan behind the user's own loop: gradients are final when backward returns, rows are there when read.

Nothing here is needed by a plain loop; what `Run` says of each method holds here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.exchanges.look_up import State
from armillary.models.gradient_hooks import refuse_step_inside
from armillary.plans.plan import Plan
from armillary.plans.units import Table
from armillary.prefetch.batches import LeftOver
from armillary.profiler.probe import Loss
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.executor import RowUnit
from armillary.runtime.loop_agreement import LATE, LastOptions, options_now
from armillary.runtime.replica_checks import Buffers, ReplicatedState, alike, differing, refuse_drift
from armillary.runtime.weight_averaging import mean_optimizer, shown, take_mean
from armillary.session.data_check import FirstBatches, even_batches
from armillary.session.health import agree_on_found_inf
from armillary.session.hooks_state import (
    Units,
    WindowOptions,
    refuse_strangers,
    rest_of,
    tell_of_zero_grad,
    tensors_of,
)
from armillary.session.job import Average, NamedTensor, TrainJob
from armillary.session.traffic_meter import MANY_RECORDS, TrafficMeter
from armillary.session.validation import refuse_state
from armillary.session.workload import Batch as MicroBatch
from armillary.stages.train_spec import StepLosses
from armillary.tables.build import WholeParameter, whole_tables
from armillary.tables.optimizer_state import close_window, open_window, parameter_names
from armillary.tables.optimizers import holder, hooks_beside, members
from armillary.tables.table import RowTable

__all__ = ["UserLoop"]

Batch = TypeVar("Batch")


class UserLoop:
    """A plan at work. `held` keeps the optimizer state of tables whose optimizer sees a window only."""

    deal = None  # each rank has its share of the data

    def __init__(self, plan: Plan, job: TrainJob, units: Units, first: FirstBatches):
        self.job, self.model, self.optimizer, self.loss = job, job.model, job.optimizer, job.loss
        self.is_scaled = job.scaler is not None and job.scaler.is_enabled()
        self.transport, self.first, self.watcher = units.executor.transport, first, job.watcher
        self._is_asking, self._left, self.coded = False, LeftOver(), ()  # for the state, itself; of streams; no edges
        self.averages: dict[str, Average] = {}
        self.hooks = ExitStack()
        self.hooks.callback(lambda: self._release())
        stepped = [one.register_step_pre_hook(self._before_step) for one in members(job.optimizer)]
        stepped += [one.register_step_post_hook(self._after_step) for one in members(job.optimizer)]
        self._own_hooks = {handle.id for handle in stepped}
        for handle in stepped:
            self.hooks.callback(handle.remove)
        for one in members(job.optimizer):
            self.hooks.callback(tell_of_zero_grad(one, self._thrown_away))
        try:
            self.begin(plan, units)
        except BaseException:
            self.hooks.close()
            raise
        first.look_at(job.model)
        if job.scaler is not None:
            self.hooks.callback(agree_on_found_inf(job.scaler, self.transport, partial(self.serve, "idle")))

    def begin(self, plan: Plan, units: Units) -> None:
        """The plan comes into force, between two steps; one that was in force before has been released."""
        executor, job = units.executor, self.job
        self.plan, self.executor, self.held = plan, executor, units.held
        # where replicas differ, each rank's statistics are of its own weights
        is_shared = job.broadcast_buffers and plan.consensus == "same"
        self.buffers = Buffers(job.model, self.transport, is_shared)
        self.traffic_meter = TrafficMeter(plan)
        self.transport.take_records()  # of before, under another plan
        self.transport.recording = True
        self.tables: dict[str, RowTable] = {table.name: table for table in executor.tables}
        self.known = {parameter for unit in executor.units for parameter in unit.parameters}
        alike = self.known - {*differing(executor.units).values()}
        executor.options = LastOptions({one: name for name, one in job.model.named_parameters() if one in alike})
        lazy = {name for one in plan.groups if one.is_lazy for name in one.parameters}
        self._window_options = WindowOptions(self.rank, job.optimizer, lazy)
        self._stepping = {table.name: holder(job.optimizer, table.parameter) for table in executor.tables}
        self._stepped = set[Optimizer]()  # in this step
        self._exchanged: dict[Optimizer, int] = {}  # how many backwards had been, when each stepped last
        self._window_options.refuse_new(self._windows())
        for one in members(job.optimizer):
            if self._spread(one):
                for handle in refuse_state(one, self._refuse_state):
                    self.hooks.callback(handle.remove)
        if self.averages:
            executor.prefetch.delay.stop()

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.executor.is_syncing = self.executor.is_syncing, False
        try:
            yield
        finally:
            self.executor.is_syncing = before

    def weigh(self, weight: float) -> None:
        if self.plan.mean != "weights":
            raise ValueError("run.weigh: the plan averages over workers; plan with mean='weights'")
        if weight < 0:
            raise ValueError(f"run.weigh: rank {self.rank}: want a weight >= 0, got {weight}")
        if self.executor.has_unsynced_grads and weight != self.executor.weight:
            raise ValueError(
                f"run.weigh: rank {self.rank}: gradients accumulated with weight {self.executor.weight} are not yet "
                f"exchanged, got {weight}; declare one weight for all batches that accumulate"
            )
        self.executor.weight = float(weight)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        return even_batches(lambda: self.executor, loader, self.first, self._left)

    def step(self, batches: Sequence[MicroBatch]) -> list[StepLosses]:
        if self.loss is None:
            raise ValueError(
                "run.step: nobody said what the loss is; give loss=loss(model, batch) to attach, or keep a loop of "
                "your own: zero_grad, backward, optimizer.step()"
            )
        if self.is_scaled:
            raise ValueError("run.step: a GradScaler is for a loop of your own; use bfloat16, which needs no scaling")
        if not batches:
            raise ValueError(f"run.step: rank {self.rank}: want one micro-batch or more, got none")
        step = self.transport.step
        self.optimizer.zero_grad(set_to_none=True)
        with self.no_sync():
            found = [self._backward(self.loss, batch, len(batches)) for batch in batches[:-1]]
        found.append(self._backward(self.loss, batches[-1], len(batches)))
        self.optimizer.step()
        return [StepLosses(step, tuple(found))]

    def _backward(self, loss: Loss, batch: MicroBatch, count: int) -> Tensor:
        value = loss(self.model, batch)
        (value / count if count > 1 else value).backward()
        return value.detach()

    def serve(self, state: State = "aside") -> None:
        """Ranks may still look up on their own, before they come to be where this one is."""
        self.executor.look_ups.serve_until(state)

    def settle(self) -> None:
        """Gradients and rows that are under way arrive; every rank must call it."""
        self.serve("idle")
        self.executor.prefetch.delay.finish()
        if self._stepped:
            self._close_step()

    def tables_of_report(self) -> tuple[Table, ...]:
        """None."""
        return ()

    def drained(self) -> list[StepLosses]:
        """Losses that were still to come: none."""
        return []

    def finish(self, state: State = "finished") -> None:
        """Serves the others until every rank has called this."""
        self.serve(state)
        self.executor.prefetch.delay.finish()
        self.transport.barrier()

    @property
    def not_whole(self) -> str:
        apart = differing(self.executor.units)
        return f"under this plan workers hold different weights between steps ({', '.join(apart)})" if apart else ""

    def alike(self) -> ReplicatedState:
        """What every rank should hold as this one does, between two steps."""
        copies = {name: table.shard for name, table in self.tables.items() if not table.is_pulled}
        options = options_now(self.optimizer, self.executor.options.alike, reads_tensors=True)
        return ReplicatedState({**dict(alike(self.units)), **copies}, options)

    def keep_up(self) -> None:
        self.settle()
        self.executor.prefetch.delay.stop()

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Collective. Inside, the model holds the newest weights; where replicas differ, their mean."""
        with shown(self.executor.units, self.model, self.transport):
            yield

    @property
    def names(self) -> list[str]:
        """Of the parameters in the optimizer, in its order."""
        return parameter_names(self.model, self.optimizer, self.tables)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(one.shape) for name, one in self.model.named_parameters(remove_duplicate=False)}

    @property
    def units(self) -> Sequence[DenseUnit | RowUnit]:
        return self.executor.units

    @contextmanager
    def rest(self) -> Iterator[dict[str, Any]]:
        """Inside, what is not cut by row or by rank: "model", a state_dict without tables, and "optimizer", by name.
        Where replicas differ, their mean."""
        means = mean_optimizer(self.units, self.optimizer, self.transport)
        with shown(self.units, self.model, self.transport), self.asking():
            rest = rest_of(self.model, self.optimizer, self.names, self.tables, self.held)
            for name, entries in means.items():
                rest["optimizer"]["state"].setdefault(name, {}).update(entries)
            yield rest

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Inside, the optimizer tells its state as it lies here, and takes such."""
        before, self._is_asking = self._is_asking, True
        try:
            yield
        finally:
            self._is_asking = before

    def _spread(self, optimizer: Optimizer) -> list[str]:
        """Tables of whose state the optimizer here holds a part."""
        return [table.name for table in self._tables_of(optimizer) if table.is_pulled or table.has_window]

    def _refuse_state(self, optimizer: Optimizer, call: str, remedy: str) -> None:
        if not self._is_asking:
            raise RuntimeError(
                f"optimizer.{call}: rank {self.rank} holds a part of the state of "
                f"{', '.join(self._spread(optimizer))}, as a run is open; {remedy}"
            )

    def held_tensors(self) -> Iterator[NamedTensor]:
        for unit in self.units:
            yield from tensors_of(unit, self.optimizer, self.held)

    def beside_bytes(self) -> Mapping[str, float]:
        """Where weights are sent, gradients are kept beside what is sent."""
        meeting = [one for one in self.units if isinstance(one, DenseUnit) and one.exchange.carries == "weights"]
        return {unit.name: float(sum(one.nbytes for one in unit.parameters)) for unit in meeting}

    def count(self) -> None:
        """Brings the tally up to date."""
        self.traffic_meter.add(self.transport.take_records())

    def _release(self) -> None:
        self.executor.release()
        self.first.look_away()
        if self.watcher is not None:
            self.watcher.stop()

    def whole(self, gather: bool) -> dict[str, WholeParameter]:
        """Tables. Where replicas differ, each has the mean from here on."""
        take_mean(self.units, self.model, self.optimizer, self.transport)
        return whole_tables(self.optimizer, self.tables, self.held, self.transport) if gather else {}

    def _thrown_away(self, optimizer: Optimizer) -> None:
        others = []
        if self.executor.has_unsynced_grads:  # else nobody asks for them, and to find them takes long
            others = [one for one in self.known if holder(self.optimizer, one) is not optimizer]
        self.executor.throw_away(self._tables_of(optimizer), others)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """With a closure the gradients are there only when it returns."""
        refuse_step_inside(self.rank)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin_step(optimizer)
            return None

        def closed() -> Any:
            value = closure()
            self._begin_step(optimizer)
            return value

        return (args[0], closed, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _begin_step(self, optimizer: Optimizer) -> None:
        with self.transport.within("step"):
            self._ready_for_step(optimizer)

    def _ready_for_step(self, optimizer: Optimizer) -> None:
        if self.executor.is_open:
            raise RuntimeError(
                f"rank {self.rank}: a backward ended in an error and its exchange is half done; start again from a "
                "checkpoint"
            )
        if self.watcher is not None:
            self.watcher.before_step(leaves_one=optimizer in self._stepped)
        self.executor.refuse_cast()
        refuse_strangers(self.rank, self.model, self.optimizer, self.known)
        self._window_options.refuse_new(self._windows())
        if optimizer in self._stepped:
            self._close_step()
        has_new = self.executor.settled != self._exchanged.get(optimizer, 0)
        if not (self.executor.is_settled and has_new):  # this rank's backward touched nothing that is exchanged
            self.executor.settle(LATE)
        self.executor.refuse_written()
        self.executor.options.read(optimizer)
        if hooks_beside(self.optimizer, self._own_hooks):  # who may look at rows it moves
            self.executor.prefetch.delay.join()
        self.executor.before_step()
        with torch.no_grad():
            for table in self._tables_of(optimizer):
                table.hand_gradient_over()
            self.executor.prefetch.delay.step(self)
            for table in self._windows(optimizer):
                open_window(table, optimizer, self.held[table.name])

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for table in self._windows(optimizer):
                close_window(table, optimizer, self.held[table.name])
            for table in self._tables_of(optimizer):
                if table.gradient is not None:
                    table.show_gradient(table.gradient)
        self.executor.weight = 1.0
        self._exchanged[optimizer] = self.executor.settled
        self._stepped.add(optimizer)
        is_complete = len(self._stepped) == len(members(self.optimizer))
        if is_complete:
            self._close_step()
        if self.watcher is not None:
            self.watcher = self.watcher.after_step(self, is_complete)

    def _close_step(self) -> None:
        """Every optimizer has stepped, or one is about to step again."""
        self._stepped.clear()
        with self.transport.within("step"):
            if self.buffers.places:
                self.serve("idle")
            self.buffers.spread(self.executor.with_data)
            self.executor.after_step()
            refuse_drift(self.alike, self.transport, lambda: self.serve("idle"))
        self.traffic_meter.end_step()
        if len(self.transport.records) > MANY_RECORDS:
            self.count()

    def as_it_was(self) -> AbstractContextManager[None]:
        """The user's loop follows what the user changes."""
        return nullcontext()

    @contextmanager
    def reloading(self, saved_plan: Mapping[str, Any], name: str) -> Iterator[None]:
        """Gradients of before belong to other values; so do the rows that a window may still hold."""
        self.executor.prefetch.delay.finish()
        self.optimizer.zero_grad(set_to_none=True)
        for table in self.tables.values():
            table.pending = []
            if table.has_window:
                table.window_rows = None
                table.parameter.data = table.shard[:0].clone()
        with self.asking():
            yield
        self._stepped.clear()
        self.executor.norms.forget()
        if self.watcher is not None:  # perhaps to that plan, whose exchanges take up what theirs had kept
            self.watcher = self.watcher.loaded(self, saved_plan, name)

    def _tables_of(self, optimizer: Optimizer) -> list[RowTable]:
        return [table for table in self.tables.values() if self._stepping[table.name] is optimizer]

    def _windows(self, optimizer: Optimizer | None = None) -> list[RowTable]:
        tables = self.tables.values() if optimizer is None else self._tables_of(optimizer)
        return [table for table in tables if table.has_window]
