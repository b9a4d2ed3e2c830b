"""Puts a plan to work on a model and its optimizer; the user's training loop stays as it was.

`attach` refuses what it cannot carry out before the first step, and leaves model and optimizer as they were. Refused
are a plan for another model or number of workers, ranks with different plans or models, and an optimizer that mixes
rows of a row-sharded table. The driver that the plan's schedule names takes the steps (`drivers.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.models.structure import passes_alike
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import exact_keywords
from armillary.plans.topology import Topology, turn_bytes_on
from armillary.profiler.probe import Loss
from armillary.profiler.unfit_model import AT_WORK
from armillary.session.drivers import open_plan
from armillary.session.job import TrainJob
from armillary.session.run import Run
from armillary.session.validation import (
    handed_in,
    other_workers,
    refuse_other_models,
    refuse_unfit,
)
from armillary.tables.optimizers import as_one
from armillary.transport.groups import Timeouts, workers_in
from armillary.transport.transport import Transport

__all__ = ["attach", "attach_over", "begin_run"]


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
    timeouts = Timeouts(report_after, timeout)
    workers = workers_in(process_group)
    if workers % plan.workers_per_node:  # no groups can be opened, to hear what other ranks say
        raise ValueError(f"attach: {other_workers(plan, workers)}")
    transport = Transport(plan.workers_per_node, check_order, timeouts, turn_bytes_on(topology), process_group)
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
    return Run(open_plan(plan, job, transport), (_at_work(job.model),), owns_transport)


def _at_work(model: nn.Module) -> Callable[[], None]:
    """Nobody else may train it; what is returned lets it go."""
    modules = [module for module in model.modules() if module._parameters]
    AT_WORK.update(modules)
    return lambda: AT_WORK.difference_update(modules)
