"""Carries out a plan whose schedule owns the loop: `run.step(batches)`, the user's model, optimizer and loss.

    plan = armillary.plan(profile, topology, schedule=Choice("cyclic", {"mode": "pipeline", "slack": 0}))
    run = armillary.drive(plan, model, optimizer, loss, batch)
    for batches in data:                 # run.micro_batches says whose
        losses = run.step(batches)       # of the steps that are complete now
        scheduler.step()                 # the rate of a gradient is the one at its own step
    run.drain()

Between steps micro-batches are under way, and a process of a pipeline, of shared devices or of a zero_ring holds part
of the model: look at it inside `run.newest()`, which changes nothing in training. No gradient is ever in the user's
hands, so clipping is the plan's (clip_norm, clip_by). Autocast around `run.step` reaches forward and loss of its
micro-batches, however late.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.runtime.agreement import begin_alike
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.one_device import OneDevice
from armillary.runtime.cyclic.pipeline import Pipeline
from armillary.runtime.cyclic.ring_loop import RingLoop
from armillary.runtime.cyclic.shared import Shared
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.team import Team
from armillary.runtime.cyclic.zero_loop import ZeroLoop
from armillary.runtime.saving.optimizer_state import parameter_names
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss
from armillary.runtime.watch.untouched import untouched
from armillary.schedules.chosen import LOOP_OWNERS, ScheduleOptions, read_choice
from armillary.schedules.cyclic_modes import RINGS, CyclicOptions
from armillary.schedules.delayed_all_reduce import DelayedOptions
from armillary.schedules.messages import home
from armillary.schedules.random_stream import seed_from_step
from armillary.schedules.schedule import Schedule
from armillary.schedules.shared import Sharing
from armillary.session.cyclic.counted_channel import CountedChannel
from armillary.session.cyclic.delayed import DelayedMode, delayed_runtime, one_stage, unfit_groups
from armillary.session.cyclic.modes import Mode, OneDeviceMode, PipelineMode, RingMode, SharedMode, ZeroRingMode
from armillary.session.cyclic.split_loss import SplitLoss, scaler_refused
from armillary.session.cyclic.stages import TracedInput, refuse_other_groups, stages_of
from armillary.session.cyclic.tables import (
    RunTables,
    look_up_orders,
    make_tables,
    table_complaints,
    table_groups,
)
from armillary.session.misfit import other_job, refuse_on_every_rank
from armillary.session.workload import Batch

__all__ = ["CyclicRun", "drive", "micro_batches_of"]


class CyclicRun:
    """A plan at work; every process makes the same calls.

    Args of note:
        micro_batches: which micro-batches of a step this process hands in: its own in a ring, a delayed all-reduce and
            on one device of several, else all of them.
        tables: whose rows are spread over the processes.
        owners: for every stage, the (first) process that has its optimizer state and its newest weights.
        names: of the parameters in the user's optimizer, as it was given.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer, transport: Transport, stages: Sequence[Stage]
    ) -> None:
        self.plan, self.model, self.optimizer, self.transport = plan, model, optimizer, transport
        self.options = read_choice(plan.schedule, plan.workers)
        self.schedule: Schedule = self.options.schedule()
        self.stages = stages
        self.channel = CountedChannel(transport)
        self.names = parameter_names(model, optimizer, {})
        self.groups = [len(group["params"]) for group in optimizer.param_groups]
        count = self.options.micro_batches
        first = self.rank * count if self.options.mode == "one_device" else 0
        self.micro_batches = (self.rank,) if self.has_own_data else tuple(range(first, first + count))
        self.tables = RunTables()
        self.owners = [_owner(self.options, self.schedule, stage.index) for stage in stages]
        self.mode: Mode
        self._finished: list[StepLosses] = []

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    @property
    def has_own_data(self) -> bool:
        """Whether every process trains on a micro-batch of its own, with running statistics of its own."""
        return self.options.mode in (*RINGS, "delayed_all_reduce")

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        """One training step: a batch for each of `micro_batches`. Returns the losses of the steps now complete.

        The optimizer's options of this moment are the step's. Stages know their losses on the last process only.

        Raises:
            ValueError: another number of batches.
        """
        if len(batches) != len(self.micro_batches):
            raise ValueError(
                f"run.step: rank {self.rank} hands in micro-batches {self.micro_batches}, got {len(batches)} batches"
            )
        self._finished += self.mode.step(batches)
        return self.losses()

    def settle(self) -> None:
        """Finishes what is under way; training goes on as if nobody had asked."""
        self._finished += self.mode.settle()

    def drain(self) -> None:
        """Settles, and the next step reads the newest weights everywhere, as the first did: part of the schedule."""
        self._finished += self.mode.drain()

    def losses(self) -> list[StepLosses]:
        """Those of the steps that have become complete and were not yet given out."""
        taken, self._finished = self._finished, []
        return taken

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Inside, `model` holds the newest weights of every stage, on every process; training goes on unchanged."""
        self.settle()
        with self.mode.newest():
            yield
            if self.tables.look_ups is not None:  # of the others, who may look longer
                self.tables.look_ups.serve_until("idle")

    def finish(self) -> None:
        """Serves the other processes' look-ups until every process has called this."""
        if self.tables.look_ups is not None:
            self.tables.look_ups.serve_until("finished")
        self.transport.barrier()


def drive(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    example: Batch,
    *,
    seed: int = 0,
    first_step: int = 0,
) -> CyclicRun:
    """Puts a plan to work whose schedule owns the loop. Every process must call it; all begin with rank 0's model.

    Args:
        optimizer: over the model's parameters, new or with a loaded state; it keeps its class and options.
        loss: loss(model, batch) -> scalar mean over one micro-batch; under a cyclic schedule it calls the model once
            and nothing else of it.
        example: a micro-batch, to cut the model with, or to try the loss on; nothing is trained on it.
        seed: with step, micro-batch and stage, fixes the random numbers of dropout and the like.
        first_step: of a resumed run: how many steps were taken before.

    Raises:
        ValueError: the plan, the model, the optimizer or the loss do not fit; the message says how to mend it.
    """
    if plan.schedule.name not in LOOP_OWNERS:
        raise ValueError(
            f"drive: the plan's schedule is {plan.schedule}; only {' and '.join(LOOP_OWNERS)} own the loop: use attach"
        )
    transport = Transport(plan.workers_per_node)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = read_choice(plan.schedule, plan.workers)
    complaint = next(other_job(plan, trainable, transport.place.workers), "") or _other_picture(plan)
    if isinstance(options, DelayedOptions):
        complaint = complaint or next(unfit_groups(plan, model), "")
    else:
        complaint = complaint or _unfit_optimizer(options, optimizer)
        complaint = complaint or next(table_complaints(plan, options, trainable, optimizer), "")
    refuse_on_every_rank("drive", plan, complaint, transport)
    begin_alike({**dict(model.named_parameters()), **dict(model.named_buffers())}, transport)
    seed = seed_from_step(seed, first_step)
    if isinstance(options, DelayedOptions):
        with untouched(model), scaler_refused():
            loss(model, example)
        run = CyclicRun(plan, model, optimizer, transport, one_stage(model))
        runtime = delayed_runtime(plan, options, model, optimizer, run.channel)
        run.mode = DelayedMode(runtime, (model, optimizer, loss), (seed, run.rank))
        return run
    transport.open_lanes()
    split = SplitLoss(loss, model, example)
    value = split.input_of(example)
    stages = stages_of(model, value, options.points)
    refuse_other_groups(plan, stages)
    orders = look_up_orders(stages, [group.parameters[0] for group in table_groups(plan)], model, value)
    is_traced = len(stages) > 1 and not isinstance(model, nn.Sequential)
    input_of = TracedInput(split, value).input_of if is_traced else split.input_of
    run = CyclicRun(plan, model, optimizer, transport, stages)
    divisor = micro_batches_of(options, run.workers)
    run.tables = make_tables(plan, (model, optimizer, stages), orders, divisor, (transport, run.channel))
    run.mode = _cyclic_mode(run, options, (split, input_of, loss), seed)
    return run


def micro_batches_of(options: ScheduleOptions, workers: int) -> int:
    """Of a step, those of all processes."""
    return options.micro_batches * (workers if options.mode == "one_device" else 1)


def _cyclic_mode(
    run: CyclicRun, options: CyclicOptions, losses: tuple[SplitLoss, Callable[[Batch], Any], Loss], seed: int
) -> Mode:
    """The runtime of a mode. losses: the loss taken apart, what the first stage reads of a batch, the loss whole."""
    split, input_of, loss = losses
    model, optimizer, stages = run.model, run.optimizer, run.stages
    recompute, remedies = frozenset(options.recompute), options.built_remedies()
    course = Course(run.schedule, split.of_output, seed, recompute, options.clip, remedies=remedies)
    if options.mode == "one_device":
        team = Team(run.transport.place, run.channel, run.tables.by_stage)
        return OneDeviceMode(OneDevice(stages, optimizer, course, team), input_of)
    if options.mode == "pipeline":
        pipeline = Pipeline(stages[run.rank], optimizer, course, run.channel, run.tables.by_stage)
        return PipelineMode(pipeline, input_of, stages, run.transport)
    if options.mode == "zero_ring":
        zero = ZeroLoop(model, stages, optimizer, course, run.channel, run.rank)
        return ZeroRingMode(zero, (model, optimizer, loss), run.transport)
    if options.mode == "shared":
        shared = Shared(stages, optimizer, course, run.channel, run.rank)
        return SharedMode(shared, input_of, stages, run.transport)
    loop = RingLoop(model, stages, optimizer, course, run.channel, run.rank)
    return RingMode(loop, (model, optimizer, loss))


def _other_picture(plan: Plan) -> str:
    """An edited plan must not show what it does not do."""
    drawn = read_choice(plan.schedule, plan.workers).picture()
    if plan.picture in ("", drawn):
        return ""
    return (
        f'the plan shows another schedule than its options make; set its picture to "", or plan again. It is\n{drawn}'
    )


def _unfit_optimizer(options: CyclicOptions, optimizer: Optimizer) -> str:
    """Why an optimizer cannot have a plan's remedies; empty if it can."""
    said = [remedy.unfit(group) for remedy in options.built_remedies() for group in optimizer.param_groups]
    return next(filter(None, said), "")


def _owner(options: ScheduleOptions, schedule: Schedule, stage: int) -> int:
    if options.mode in RINGS:
        return home(schedule, stage)
    if options.mode == "shared":
        return Sharing(schedule).home(stage)
    return stage if options.mode == "pipeline" else 0
