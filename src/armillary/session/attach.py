"""Puts a plan to work on a model and its optimizer; the user's training loop stays as it was.

`attach` refuses what it cannot carry out, before the first step: a plan for another model or number of workers, ranks
that hold different plans or models, an optimizer that mixes rows on a row-sharded table. What it refuses is left as it
was.

A change to a model and its optimizer that is made whole or not at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.models.structure import passes_alike
from armillary.plans.factory_errors import exact_keywords
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology, turn_bytes_on
from armillary.profiler.probe import Loss
from armillary.profiler.unfit_model import AT_WORK
from armillary.schedules.registry import options_of, owns_loop
from armillary.session.data_check import FirstBatches
from armillary.session.hooks_engine import UserLoop
from armillary.session.hooks_state import units_of
from armillary.session.job import TrainJob
from armillary.session.replica_checks import agree_on_found_inf
from armillary.session.run import Run
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.schedule_validation import owned_misfit
from armillary.session.validation import (
    handed_in,
    other_workers,
    refuse_on_every_rank,
    refuse_other_models,
    refuse_unfit,
    why_not_apart,
    why_unfit,
)
from armillary.tables.handle import TableHandle, become
from armillary.tables.meta_init import begin_optimizer_state, materialise
from armillary.tables.optimizers import as_one, members
from armillary.transport.agreement import begin_alike
from armillary.transport.groups import workers_in
from armillary.transport.transport import Transport
from armillary.transport.watchdog import Patience

__all__ = ["all_or_nothing", "attach", "attach_over", "begin_run"]


@contextmanager
def all_or_nothing(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After an error inside, parameters are what they were, and the optimizer holds them and the state that it held.
    Values that were written to in place stay written."""
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, TableHandle)]
    held = [(parameter, parameter.data, parameter.requires_grad) for parameter in plain]
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter, values, requires_grad in held:
            if isinstance(parameter, TableHandle):
                become(parameter, nn.Parameter(values, requires_grad))
        for group, params in groups:
            group["params"][:] = params
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


@exact_keywords
def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    loss: Loss | None = None,
    example: Any = None,
    seed: int = 0,
    first_step: int = 0,
    scaler: Any = None,
    report_after: float | None = 60.0,
    timeout: float = 600.0,
    check_order: bool = False,
    check_data: bool = True,
    check_finite: bool = False,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    topology: Topology | None = None,
    profile: Profile | None = None,
) -> Run:
    """Carries out `plan`: from now on every backward ends with final gradients on every worker. Every rank must call
    it; all begin with rank 0's model.

    Args:
        plan: made for this model and number of workers.
        model: an ordinary module on this rank; row-sharded tables in it become handles that are read by row. It may
            be on the meta device: then it gets its values here (see `materialise`).
        optimizer: over the model's parameters; keeps its class and options, and holds this rank's rows of the tables.
            Or several, each parameter in one of them: a step is over when all have stepped, or one steps again.
        loss: loss(model, batch) -> scalar mean over one micro-batch, for `run.step`; a loop of your own needs none.
        example: a micro-batch, to cut the model with, or to try the loss on; nothing is trained on it.
        seed: with step, micro-batch and stage, fixes the random numbers of dropout and the like under `run.step`.
        first_step: of a resumed run: how many steps were taken before.
        scaler: the loop's GradScaler, if it has one: ranks then agree on skipped steps.
        report_after: seconds that a rank waits for another before who stands where is printed to stderr, and again
            whenever as long has passed; None: never.
        timeout: seconds after which one wait for another rank ends in an error, which says where the others stood. A
            rank may be away for as long, for example to evaluate alone.
        check_order: compare every request across ranks before it is made (slow; finds ranks out of order).
        check_data: compare the first batches across ranks, so that none trains on another's data by mistake. What goes
            through the model's forward and `run.shard` is seen.
        check_finite: a backward in which some rank's own gradients are not finite ends in a FloatingPointError on every
            rank, which names rank and parameters; nothing is stepped. Takes a look at every gradient and 8 bytes a
            backward. Not beside a GradScaler, which skips such steps, nor under a schedule that owns the loop.
        broadcast_buffers: rank 0's buffers (BatchNorm's statistics) reach all ranks after every step, as DDP's do
            before one. Without, every rank has its own, and rank 0's are saved. Not under a schedule that owns the
            loop, which has a rule of its own, nor where replicas differ.
        process_group: the ranks that train; without, all of the job.
        topology: the links, where they are known: what they carry quickly takes no turns on them. Changes nothing but
            time. Without, as on links of 100 Mbit/s.
        profile: what the plan was made from; checkpoints keep it.

    Raises:
        ValueError: the plan, the model or the optimizer do not fit; the message says how to mend it.
    """
    job = TrainJob(model, as_one(optimizer), loss, example, seed, first_step, scaler, check_data, broadcast_buffers)
    job = replace(job, profile=profile, topology=topology, check_finite=check_finite)
    patience = Patience(report_after, timeout)
    workers = workers_in(process_group)
    if workers % plan.workers_per_node:  # no groups can be opened, to hear what other ranks say
        raise ValueError(f"attach: {other_workers(plan, workers)}")
    transport = Transport(plan.workers_per_node, check_order, patience, turn_bytes_on(topology), process_group)
    return begin_run(transport, plan, job)


def begin_run(transport: Transport, plan: Plan, job: TrainJob) -> Run:
    """As `attach`, over connections that were opened for this run."""
    try:
        return attach_over(transport, plan, job)
    except BaseException as error:
        transport.tell(f"{type(error).__name__}: {error}")
        transport.give_up()
        raise


def attach_over(transport: Transport, plan: Plan, job: TrainJob, owns_transport: bool = True) -> Run:
    """As `attach`, over connections that are there.

    Args:
        owns_transport: whether the run's end is theirs; not where several runs take turns.
    """
    transport.step = job.first_step
    with transport.within("attach"):
        refuse_unfit("attach", handed_in(job.model, job.optimizer) or _scaled(job), transport)
        refuse_other_models("attach", job.model, transport)
        return _attached(transport, plan, job, owns_transport)


def _scaled(job: TrainJob) -> str:
    """That a step could be skipped here and not on ranks that this run does not know; empty if it could not."""
    if job.scaler is None or not job.scaler.is_enabled() or not passes_alike(job.model):
        return ""
    return (
        "the model is spread over ranks outside this process group, which could not agree with a GradScaler on skipped "
        "steps; use bfloat16, which needs no scaling"
    )


def _attached(transport: Transport, plan: Plan, job: TrainJob, owns_transport: bool) -> Run:
    if owns_loop(plan.schedule):
        owned = _owned_loop(plan, job, transport)
        return Run(owned, (_at_work(job.model),), owns_transport)
    model, optimizer = job.model, job.optimizer
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    complaint = _other_nodes(plan, transport)
    if not complaint:
        for one in members(optimizer):
            begin_optimizer_state(one)
        complaint = why_unfit(plan, trainable, optimizer, transport.place.workers) or why_not_apart(plan, job)
    refuse_on_every_rank("attach", plan, complaint, transport, job.options)
    shards = materialise(model, optimizer, plan, transport)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    begin_alike({name: tensor for name, tensor in tensors.items() if name not in shards}, transport)
    with all_or_nothing(model, optimizer):
        engine = _user_loop(plan, job, transport, shards)
    undo = [_at_work(model)]
    if job.scaler is not None:
        undo.append(agree_on_found_inf(job.scaler, transport, partial(engine.serve, "idle")))
    return Run(engine, undo, owns_transport)


def _at_work(model: nn.Module) -> Callable[[], None]:
    """Nobody else may train it; what is returned lets it go."""
    modules = [module for module in model.modules() if module._parameters]
    AT_WORK.update(modules)
    return lambda: AT_WORK.difference_update(modules)


def _owned_loop(plan: Plan, job: TrainJob, transport: Transport) -> OwnedLoop:
    complaint = _other_nodes(plan, transport) or owned_misfit(plan, job, transport.place.workers)
    complaint = complaint or _no_road(plan, job.model, transport)
    refuse_on_every_rank("attach", plan, complaint, transport, job.options)
    begin_alike({**dict(job.model.named_parameters()), **dict(job.model.named_buffers())}, transport)
    if options_of(plan).method.is_cut:
        transport.open_lanes()
    with all_or_nothing(job.model, job.optimizer):
        return OwnedLoop(plan, job, transport)


def _no_road(plan: Plan, model: nn.Module, transport: Transport) -> str:
    """That stages cannot send to one another from where they are, with the remedy; empty if they can."""
    away = {parameter.device.type for parameter in model.parameters()} - {"cpu", "meta"}
    if (
        not options_of(plan).method.is_cut
        or transport.place.workers == 1
        or all(("world", device) in transport.groups for device in away)
    ):
        return ""
    device = min(away)
    return (
        f"schedule: {plan.schedule.name} sends activations from rank to rank, and gloo carries no messages of {device}"
        f" (it ends the process); start the process group with backend 'cpu:gloo,{device}:nccl' and a device for every"
        " rank, or leave it to Armillary; or train on the CPU"
    )


def _user_loop(plan: Plan, job: TrainJob, transport: Transport, shards: Mapping[str, Tensor]) -> UserLoop:
    """shards: this rank's rows of the tables that have no values yet."""
    first = FirstBatches(transport, job.check_data)
    units = units_of(plan, job, transport, first, shards)
    try:
        return UserLoop(plan, job, units, first)
    except BaseException:
        units.executor.release()
        raise


def _other_nodes(plan: Plan, transport: Transport) -> str:
    """That those connections are made for other nodes than the plan's, with the remedy; empty if they are not."""
    wanted, there = plan.workers_per_node, transport.place.workers_per_node
    if wanted == there:
        return ""
    return (
        f"the transport given has nodes of {there}, the plan wants nodes of {wanted}; make it with "
        f"Transport(workers_per_node={wanted})"
    )
