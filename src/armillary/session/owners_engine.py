"""Carries out a plan whose ranks have no common clock: pull, compute, push; owners step with each push as it comes.

`run.step([batch])` asks nobody but the owners. Calls that all ranks make (save, load, export, evaluate, close) wait for
all, whatever their counts: each rank steps aside, and its owner waits until every other has, so that all that was
pushed is stepped with. Inside them the model is whole and plain on every rank, tables too, with the owners' values.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.look_up import State
from armillary.owners.owner import BodyForm, OwnedPart, Owner, joined_rows, options_of, owned_by_bytes
from armillary.owners.worker import NotPulled, PulledTable, Worker
from armillary.plans.plan import Plan
from armillary.plans.units import Table
from armillary.plans.update_log import Event, Kind, UpdateLog, staleness
from armillary.runtime.replica_checks import ReplicatedState
from armillary.schedules.random_streams import seeded
from armillary.schedules.registry import options_of as schedule_of
from armillary.session.data_check import FirstBatches
from armillary.session.job import Average, NamedTensor, TrainJob
from armillary.session.traffic_meter import OTHER, TrafficMeter
from armillary.session.undo import begun_anew, copies
from armillary.session.validation import refuse_state
from armillary.session.workload import Batch, device_of
from armillary.stages.train_spec import StepLosses
from armillary.tables.build import WholeParameter
from armillary.tables.handle import TableHandle, become
from armillary.tables.optimizer_state import Held, named_groups, parameter_names
from armillary.tables.table import RowTable
from armillary.transport.mailbox import OwnerMailbox
from armillary.transport.transport import Transport

__all__ = ["OwnersLoop"]

NEVER = (-1, -1)


class OwnersLoop:
    """A plan at work (`job.Job`).

    Args of note:
        clock: steps that this rank has taken under the plan; a checkpoint's step is that of the rank with most.
    """

    coded: Sequence[tuple[bool, ...]] = ()
    units: Sequence[Any] = ()

    def __init__(self, plan: Plan, job: TrainJob, transport: Transport) -> None:
        self.plan, self.job, self.transport = plan, job, transport
        self.model, self.optimizer = job.model, job.optimizer
        self.options = schedule_of(plan)
        self.traffic_meter, self.averages = TrafficMeter(plan), dict[str, Average]()
        self.tables: Mapping[str, RowTable] = {}
        self.held: Mapping[str, Held] = {}
        self.names = parameter_names(job.model, job.optimizer, {})
        self.shapes = {name: tuple(one.shape) for name, one in job.model.named_parameters(remove_duplicate=False)}
        self.first, self.hooks = FirstBatches(transport, False), ExitStack()
        self.begin()

    def begin(self) -> None:
        """From a plain model and optimizer, at the transport's step."""
        by_row = [name for group in self.plan.groups if group.layout == "row_sharded" for name in group.parameters]
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.forms = {name: BodyForm(tuple(one.shape), one.dtype) for name, one in trained.items()}
        ownings = owned_by_bytes(trained, by_row, self.workers)
        self.part = OwnedPart(ownings, self.rank, trained, self.optimizer)
        self.mailbox = OwnerMailbox(self.transport)
        self.owner = Owner(self.part, self.workers, self.options.bound, self.mailbox)
        self.clock, self._asides, self._broken = 0, 0, ""
        self._epochs, self._dealt = 0, NEVER
        self._counted = Counter[str]()
        self.optimizer.state.clear()
        self._tables = {name: PulledTable(name, trained[name], ownings) for name in ownings.tables}
        self._handled = {name: trained[name] for name in ownings.tables}  # parameter objects
        self._is_plain = True
        self._hide()
        forward = partial(_loss, self.job, self.model)
        self.worker = Worker(self.mailbox, ownings, self.model, self._tables, self.forms, forward)
        stepped = self.optimizer.register_step_pre_hook(self._refuse_own_step)
        for handle in (stepped, *refuse_state(self.optimizer, self._refuse_state)):
            self.hooks.callback(handle.remove)
        self.hooks.callback(self.mailbox.give_up)
        self.owner.start()

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        """Forward and backward of one batch on the owners' values, and its gradients pushed; the optimizer's options of
        this moment are the step's.

        Raises:
            ValueError: not one batch. RuntimeError: an earlier step or the owner's thread ended with an error.
        """
        if len(batches) != 1:
            raise ValueError(
                f"run.step: under schedule {self.plan.schedule.name} every batch is an update of its own, so nothing "
                f"accumulates: want one batch, got {len(batches)}"
            )
        if self._broken:
            raise RuntimeError(f"rank {self.rank}: a step ended in an error ({self._broken}); start from a checkpoint")
        self.owner.refuse_failed()
        (batch,), number = batches, self._dealt
        try:
            value = self._computed(batch, Event(Kind.PULL, self.rank, self.clock, *number))
            self.worker.push(Event(Kind.PUSH, self.rank, self.clock, *number), options_of(self.optimizer))
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        step, self._dealt = self.transport.step, NEVER
        self.clock += 1
        self.transport.step += 1
        vars(self.optimizer)["_opt_called"] = True  # a scheduler asks whether steps are taken
        self.traffic_meter.end_step()
        return [StepLosses(step, (value,))]

    def _computed(self, batch: Batch, event: Event) -> Tensor:
        """The loss; gradients are there."""
        self.worker.look(batch)
        self.worker.pull(event)
        try:
            return self._passed(batch)
        except NotPulled:
            self.worker.look(batch, is_sure=True)
            self.worker.pull(event)
        try:
            return self._passed(batch)
        except NotPulled:
            raise RuntimeError(
                f"rank {self.rank}: which rows the model reads depends on the values that it has read; such a table "
                "cannot be pulled before its forward: freeze it, or plan without this schedule"
            ) from None

    def _passed(self, batch: Batch) -> Tensor:
        assert self.job.loss is not None
        with seeded(self.job.seed, (self.clock, self.rank, 0), device_of(self.model)):
            value = self.job.loss(self.model, batch)
            value.backward()
        return value.detach()

    def deal(self) -> Callable[[], int]:
        """For a new epoch: gives the numbers of batches, each to one rank, which are those of the next step."""
        epoch, self._epochs = self._epochs, self._epochs + 1

        def dealt() -> int:
            number = self.worker.dealt(epoch)
            self._dealt = (epoch, number)
            return number

        return dealt

    def serve(self, state: State = "aside") -> None:
        """Steps aside until every rank has, and every push is stepped with."""
        self.owner.refuse_failed()
        self._asides += 1
        self.worker.step_aside(self.clock)
        with self.transport.waiting("the others to come to this call"):
            self.owner.wait_aside(self._asides, self.transport.watchdog.timeouts.timeout)
        self.transport.step = round(self.transport.agree_largest([float(self.transport.step)])[0])

    def settle(self) -> None:
        self.serve()

    keep_up = settle

    def drained(self) -> list[StepLosses]:
        self.serve()
        return []

    def alike(self) -> ReplicatedState:
        """Nothing: between two steps ranks hold what they pulled last, and options of clocks of their own."""
        return ReplicatedState({})

    @property
    def not_whole(self) -> str:
        return f"under schedule {self.plan.schedule.name} the newest weights are with their owners between steps"

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Collective. Inside, the model is plain and holds the owners' values."""
        self.serve()
        with torch.no_grad():
            self._show()
        dealt = self._dealt
        try:
            yield
        finally:
            self._hide()
            self._dealt = dealt

    def _show(self) -> None:
        """Every parameter as its owner has it. Pulls overwrite what is copied."""
        ownings, parameters = self.part.ownings, dict(self.model.named_parameters())
        for owner, names in enumerate(ownings.dense):
            for name in names:
                if owner == self.rank:
                    parameters[name].copy_(self.part.whole[name])
                self.transport.spread(parameters[name], owner)
        for name, dealt in ownings.tables.items():
            parts = self.transport.share(self.part.tables[name].shard)
            become(self._handled[name], nn.Parameter(joined_rows(parts, dealt)))
        self._is_plain = True

    def _hide(self) -> None:
        """Tables stand in the model as handles, which read what was pulled."""
        for name, table in self._tables.items() if self._is_plain else ():
            become(self._handled[name], TableHandle(table, table.shard, requires_grad=True))
        self._is_plain = False

    def finish(self, state: State = "finished") -> None:
        """Waits until every rank has called this."""
        self.transport.barrier()

    @contextmanager
    def rest(self) -> Iterator[dict[str, Any]]:
        """Collective. Inside, on every rank: "model", a whole state_dict, and "optimizer", by name."""
        with self.newest():
            state = self._states()
            sizes = (len(group["params"]) for group in self.optimizer.param_groups)
            groups = named_groups(self.optimizer, self.names, sizes)
            ordered = {name: state[name] for name in self.names if state.get(name)}
            yield {"model": dict(self.model.state_dict()), "optimizer": {"state": ordered, "param_groups": groups}}

    def _states(self) -> dict[str, dict[str, Any]]:
        """Collective: the optimizer's state of every parameter, whole. What is not by row, such as a count of steps, is
        that of the owner which has stepped a table most often."""
        ownings, found = self.part.ownings, dict[str, dict[str, Any]]()
        for theirs in self.transport.share({name: self.part.rest_of(name) for name in ownings.dense[self.rank]}):
            found |= theirs
        for name, dealt in ownings.tables.items():
            rests: list[dict[str, Any]] = self.transport.share(self.part.rest_of(name))
            parts: list[dict[str, Tensor]] = self.transport.share(self.part.row_state[name])
            latest: dict[str, Any] = max(rests, key=lambda one: float(one.get("step", 0)))
            found[name] = dict(latest)
            for key, like in {key: one for part in parts for key, one in part.items()}.items():
                sizes = [(dealt.shard_rows(rank), *like.shape[1:]) for rank in range(self.workers)]
                rows = [part.get(key, like.new_zeros(size)) for part, size in zip(parts, sizes, strict=True)]
                found[name][key] = joined_rows(rows, dealt)
        return found

    def logs(self) -> list[UpdateLog]:
        """Collective: every owner's, after every push was stepped with."""
        self.serve()
        return self.transport.share(self.owner.log)

    def tables_of_report(self) -> tuple[Table, ...]:
        """Collective: how stale updates were, on all owners, and how many pulls the bound held back."""
        everyones = self.transport.share((staleness(self.owner.log), self.owner.log.waited, self.clock))
        stale = sum((one for one, _, _ in everyones), start=type(everyones[0][0])())
        total = sum(stale.values())
        rows = [
            (str(by), f"{stale[by]:,}", f"{stale[by] / total:.1%}", "#" * round(40 * stale[by] / max(stale.values())))
            for by in sorted(stale)
        ]
        steps = [(f"steps of rank {rank}", f"{clock:,}", "", "") for rank, (_, _, clock) in enumerate(everyones)]
        waited = ("pulls that waited", f"{sum(waited for _, waited, _ in everyones):,}", "", "")
        return (Table(("updates staler by", "times", "share", ""), [*rows, waited, *steps], (0, 3)),)

    def as_it_was(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reloading(self, saved_plan: Mapping[str, Any], name: str) -> AbstractContextManager[None]:
        return begun_anew(self, self.begin)

    def whole(self, gather: bool) -> dict[str, WholeParameter]:
        """Nobody's values are asked for any more: the owner's thread ends."""
        found = copies(self)
        self.mailbox.close()
        self.owner.join(self.transport.watchdog.timeouts.timeout)
        return found

    def _refuse_own_step(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            f"optimizer.step() was called on rank {self.rank}, but under schedule {self.plan.schedule.name} owners "
            "step with what run.step([batch]) pushes: call that alone"
        )

    def _refuse_state(self, _: Optimizer, call: str, remedy: str) -> NoReturn:
        raise RuntimeError(
            f"optimizer.{call}: under schedule {self.plan.schedule.name} the optimizer's state is with the owners; "
            f"{remedy}"
        )

    def count(self) -> None:
        """Brings the tally up to date: what this rank sent as a worker, and answered as an owner."""
        group_of, sent = self.traffic_meter.group_of, self.worker.sent + self.owner.sent
        for name, nbytes in (sent - self._counted).items():
            self.traffic_meter.put(group_of.get(name, OTHER), float(nbytes), 0.0)
        self._counted = sent

    def held_tensors(self) -> Iterator[NamedTensor]:
        """What is owned here, with the optimizer's state, and this rank's copy of what is read whole."""
        for name in self.forms:
            yield from (NamedTensor(name, one) for one in self.part.tensors(name))
        yield from (NamedTensor(name, one) for name, one in self.worker.dense.items())

    def beside_bytes(self) -> Mapping[str, float]:
        return {}

    def no_sync(self) -> AbstractContextManager[None]:
        self._refuse("no_sync", "every batch is an update of its own, so nothing accumulates")

    def weigh(self, weight: float) -> NoReturn:
        self._refuse("weigh", "there is no mean over ranks: every batch is an update of its own")

    def batches(self, loader: Any) -> NoReturn:
        self._refuse(
            "batches", "ranks need not have as many batches: use run.shard, which deals them as they are asked"
        )

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(f"run.{what}: under schedule {self.plan.schedule.name} {remedy}")


def _loss(job: TrainJob, model: nn.Module, batch: Batch) -> Tensor:
    assert job.loss is not None
    return job.loss(model, batch)
