"""Carries out a plan whose schedule owns the loop: `run.step(micro_batches)`, the user's model, optimizer and loss.

Between steps micro-batches are under way, and a process may hold part of the model only: look at it inside `newest`,
which changes nothing in training. No gradient is ever in the user's hands, so clipping is the plan's (clip_norm,
clip_by). Autocast around `run.step` reaches forward and loss of its micro-batches, however late.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

from torch.optim import Optimizer

from armillary.exchanges.look_up import State
from armillary.plans.mesh import DATA
from armillary.plans.plan import Plan
from armillary.plans.units import Table
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.loop_agreement import options_now
from armillary.runtime.replica_checks import ReplicatedState
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of
from armillary.session.attached_state import AttachedState, attached_state, refuse_other_batches
from armillary.session.data_check import FirstBatches
from armillary.session.delayed_loop import OwnLoopEngine
from armillary.session.instruction_engine import InterpretedEngine, LossBroadcast
from armillary.session.job import Average, NamedTensor, TrainJob
from armillary.session.stage_setup import Engine, set_up_stages
from armillary.session.traffic_meter import MANY_RECORDS, EdgeLabels, TrafficMeter
from armillary.session.undo import begun_anew, copies
from armillary.session.validation import refuse_state
from armillary.session.workload import Batch
from armillary.stages.train_spec import StepLosses
from armillary.tables.build import WholeParameter
from armillary.tables.optimizer_state import Held, named_groups, parameter_names
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = ["OwnedLoop"]

COMPARED_STEPS = 3  # in which ranks of one replica show that they were given the same micro-batches


class OwnedLoop:
    """A plan at work; every process makes the same calls.

    Args of note:
        names: of the parameters in the user's optimizer, as it was given.
        tables, held: none, a schedule keeps them whole.
        owners: for every stage, the (first) process that has its optimizer state and its newest weights.
    """

    deal = None  # each rank has its share of the data

    def __init__(self, plan: Plan, job: TrainJob, transport: Transport) -> None:
        self.plan, self.job, self.transport = plan, job, transport
        self.model, self.optimizer = job.model, job.optimizer
        self.transport.recording = True
        self.traffic_meter = TrafficMeter(plan)
        self.averages: dict[str, Average] = {}
        self.tables: Mapping[str, RowTable] = {}
        self.held: Mapping[str, Held] = {}
        self.names = parameter_names(job.model, job.optimizer, {})
        self.shapes = {name: tuple(one.shape) for name, one in job.model.named_parameters(remove_duplicate=False)}
        self._finished: list[StepLosses] = []
        self._taken = 0  # steps here
        self.hooks = ExitStack()
        self._is_at_work = False  # the engine, which may step the optimizer
        self._broken = ""  # by which error, half way
        one_each = [rank for rank in range(plan.workers) if plan.mesh.sharing_data(rank)[0] == rank]
        self.first = FirstBatches(transport, job.check_data and len(one_each) > 1, one_each)
        self.begin()
        if self.rank == 0:
            self.taken.warn_of_mode()

    def begin(self) -> None:
        """From a plain model and optimizer, at the transport's step."""
        self.first_step = self.transport.step  # of this part of the training
        self.parts = set_up_stages(self.plan, self.job, self.transport, self.first_step)
        self.coded, self.engine = self.parts.coded, self._driven()
        self.hooks.push(self.engine.hooks)
        self.owners = [self.options.where.owner(stage.index) for stage in self.parts.stages]
        self._told = self._telling()
        if self.options.method.is_cut:
            self.hooks.callback(self.model.register_forward_pre_hook(self._refuse_own_forward).remove)
            for handle in refuse_state(self.optimizer, self._refuse_state):
                self.hooks.callback(handle.remove)
        who = f"rank {self.rank}: under schedule {self.plan.schedule.name}"
        self.taken: AttachedState = attached_state(who, self.parts)

    def _driven(self) -> Engine:
        """By the list of instructions; without a loss by the loop of the user's own."""
        if self.job.loss is not None:
            engine = InterpretedEngine(self.parts)  # first: it may refuse, and nothing may hang on the optimizer then
            self.hooks.callback(self.optimizer.register_step_pre_hook(self._refuse_own_step).remove)
            return engine
        self.first.look_at(self.model)
        self.hooks.callback(self.first.look_away)
        return OwnLoopEngine(self.parts, lambda: self.taken.refuse_changed(), self._looped)

    def _stepped(self) -> None:
        """A step is over."""
        self._taken += 1
        self.transport.step += 1
        self.traffic_meter.end_step()
        if len(self.transport.records) > MANY_RECORDS:
            self.count()

    def _looped(self) -> None:
        """A step of the user's own loop is over."""
        self.first.compare()
        self._stepped()

    def _telling(self) -> LossBroadcast | None:
        if self.engine.teller is None:
            return None
        schedule = self.parts.spec.schedule
        last = max(action.start for row in schedule.ticks for action in row)
        # where steps do not overlap all is known when the last gradient has come; else a step later nobody waits
        lag = last // schedule.period + 1 if schedule.overlaps else 0
        listeners = self.plan.mesh.sharing_data(self.rank)
        return LossBroadcast(self.transport, self.engine.teller, listeners, schedule.micro_batches, lag)

    @property
    def options(self) -> ScheduleOptions:
        return self.parts.options

    @property
    def units(self) -> Sequence[DenseUnit]:
        return self.engine.units

    @property
    def has_own_data(self) -> bool:
        """Whether processes are data coordinates, not stages of one replica."""
        return options_of(self.plan).method.axis == DATA

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    @property
    def micro_batches(self) -> range:
        """Which micro-batches of a step this process hands in; processes of one replica hand in the same."""
        return self.options.handed_in(self.rank, self.workers)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        """One training step: a batch for each of `micro_batches`. Returns the losses of the steps now complete.

        The optimizer's options of this moment are the step's.

        Raises:
            ValueError: another number of batches, ranks of one replica were given different ones, or the model or the
                optimizer are no longer what the schedule took over. Nothing was begun.
        """
        wanted = self.micro_batches
        if len(batches) != len(wanted):
            raise ValueError(
                f"run.step: rank {self.rank} hands in {len(wanted)} micro-batches a step (numbers {wanted.start} to "
                f"{wanted.stop - 1} of {self.options.total(self.workers)}), got {len(batches)}"
            )
        given = self.engine.given(batches)  # what is refused up to here breaks nothing
        self.taken.refuse_changed()
        if self._taken < COMPARED_STEPS:
            refuse_other_batches(self.transport, wanted, batches)
        self.first.take(batches)
        self.first.compare()
        with self._working():
            if self._told is not None:
                self._told.begin_step()
            self._collect(self.engine.step(given))
        self._stepped()
        return self.losses()

    @contextmanager
    def _working(self) -> Iterator[None]:
        if self._broken:
            raise RuntimeError(
                f"rank {self.rank}: a step ended in an error ({self._broken}), and what it still had to do is lost; "
                "start again from a checkpoint"
            )
        self._is_at_work = True
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._is_at_work = False

    def _refuse_own_forward(self, *_: Any) -> None:
        """
        Raises:
            RuntimeError: a loop of the user's own calls a model of which this process holds some stages alone.
        """
        here = self.model.named_parameters(remove_duplicate=False)
        if away := next((name for name, one in here if tuple(one.shape) != self.shapes[name]), ""):
            raise RuntimeError(
                f"the model was called on rank {self.rank}, but under schedule {self.plan.schedule.name} {away} is on "
                "another rank: train by run.step(micro_batches), and look at the model by run.evaluate"
            )

    def _refuse_own_step(self, *_: Any) -> None:
        """
        Raises:
            RuntimeError: a loop of the user's own steps the optimizer, with gradients that nobody exchanged.
        """
        if not self._is_at_work:
            alone = "" if self.options.method.is_cut else ", or attach without loss and example to keep a loop of yours"
            raise RuntimeError(
                f"optimizer.step() was called on rank {self.rank}, but under schedule {self.plan.schedule.name} steps "
                f"are taken by run.step(micro_batches), which steps the optimizer: call that alone{alone}"
            )

    def _collect(self, known: Sequence[StepLosses], everything: bool = False) -> None:
        found = list(known) if self._told is None else self._told.take(known, everything)
        self._finished += [StepLosses(self.first_step + one.step, one.losses) for one in found]

    def losses(self) -> list[StepLosses]:
        """Those of the steps that have become complete and were not yet given out."""
        taken, self._finished = self._finished, []
        return taken

    def serve(self, state: State = "aside") -> None:
        """Nothing: no rank looks rows up on its own."""

    def alike(self) -> ReplicatedState:
        """What the other processes that hold these stages should hold, too, between two steps."""
        self.settle()
        there = self.engine.alike()
        return ReplicatedState(there, options_now(self.optimizer, {*there.values()}, reads_tensors=True))

    def settle(self) -> None:
        """Finishes what is under way; training goes on as if nobody had asked."""
        with self._working(), self.taken.as_it_was():
            self._collect(self.engine.settle(), everything=True)

    def drain(self) -> None:
        """Settles, and the next step reads the newest weights everywhere, as the first did: part of the schedule."""
        with self._working(), self.taken.as_it_was():
            self._collect(self.engine.drain(), everything=True)

    def tables_of_report(self) -> tuple[Table, ...]:
        """None."""
        return ()

    def drained(self) -> list[StepLosses]:
        """Drains; the losses of all steps that nobody was given yet."""
        self.drain()
        return self.losses()

    @property
    def not_whole(self) -> str:
        name = self.plan.schedule.name
        if not self.has_own_data or self.parts.spec.schedule.stale_share:
            return f"under schedule {name} the model does not hold the newest weights between steps"
        return ""

    def keep_up(self) -> None:
        self.settle()

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Inside, `model` holds the newest weights of every stage, on every process; training goes on unchanged."""
        self.settle()
        with self.taken.as_it_was(), self.engine.newest():
            yield

    def finish(self, state: State = "finished") -> None:
        """Waits until every process has called this."""
        self.transport.barrier()

    @contextmanager
    def rest(self) -> Iterator[dict[str, Any]]:
        """Collective, between two steps; drains. Inside, on every rank: "model", a state_dict, and "optimizer", by
        name."""
        self.drain()
        state: dict[str, Any] = {}
        mine = self._states()
        for stage, owner in zip(self.parts.stages, self.owners, strict=True):  # one stage at a time on the network
            held = {name: mine[name] for name in stage.names.values() if name in mine and name not in state}
            state.update(self.transport.share(held if self.rank == owner else None)[owner])
        groups = named_groups(self.optimizer, self.names, map(len, self.taken.groups))
        ordered = {name: state[name] for name in self.names if name in state}
        with self.newest():
            model = dict(self.model.state_dict())
            yield {"model": model, "optimizer": {"state": ordered, "param_groups": groups}}

    def _states(self) -> dict[str, dict[str, Any]]:
        """The optimizer state that this process holds, by name. Owners keep that of their stages."""
        states = ((name, self.optimizer.state.get(p, {})) for name, p in self.model.named_parameters())
        return {name: dict(entries) for name, entries in states if entries}

    def as_it_was(self) -> AbstractContextManager[None]:
        return self.taken.as_it_was()

    @contextmanager
    def reloading(self, saved_plan: Mapping[str, Any], name: str) -> Iterator[None]:
        """The engine is built anew, on the same connections."""
        with begun_anew(self, self.begin):
            self.losses()  # of steps that are behind the training which is loaded now: nobody is told
            yield

    def whole(self, gather: bool) -> dict[str, WholeParameter]:
        return copies(self)

    def _refuse_state(self, _: Optimizer, call: str, remedy: str) -> NoReturn:
        raise RuntimeError(
            f"optimizer.{call}: under schedule {self.plan.schedule.name} rank {self.rank} holds the state of some "
            f"stages only; {remedy}"
        )

    def count(self) -> None:
        """Brings the tally up to date."""
        edges = EdgeLabels(self.plan)
        for label, (sent, waited) in self.parts.channel.take().items():
            self.traffic_meter.put(edges.group_of(label), sent, waited)
        self.traffic_meter.keep(self.transport.take_records())

    def held_tensors(self) -> Iterator[NamedTensor]:
        """Gradients as they cross are held, too, and what their exchanges keep."""
        for name, weight in self.model.named_parameters():
            for one in (weight, *self.optimizer.state.get(weight, {}).values()):
                yield NamedTensor(name, one)
        for unit in self.units:
            buckets = [bucket.flat for bucket in (unit.bucket, unit.spare) if bucket is not None]
            yield from (NamedTensor(unit.bucket.layout.names[0], one) for one in (*buckets, *unit.state.values()))

    def beside_bytes(self) -> Mapping[str, float]:
        return {self.plan.groups[0].name: self.engine.lent_bytes}

    def no_sync(self) -> NoReturn:
        if self.job.loss is None:
            self._refuse("no_sync", "a step has one micro-batch of a worker: join them, or use more workers")
        self._refuse("no_sync", "it takes all micro-batches of a step together: give them to run.step")

    def weigh(self, weight: float) -> NoReturn:
        self._refuse("weigh", "its mean is over micro-batches; plan with schedule simultaneous and mean='weights'")

    def batches(self, loader: Any) -> NoReturn:
        self._refuse("batches", "it needs as many micro-batches on every rank: use run.shard")

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(f"run.{what}: the plan's schedule {self.plan.schedule.name} owns the loop; {remedy}")
