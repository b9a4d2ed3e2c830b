"""What speaks against carrying out a plan whose schedule owns the loop, found before anything is touched."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.planning.parallax import PLAIN
from armillary.runtime.hybrid.optimizers import kind_of, members
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of
from armillary.session.cyclic.tables import table_complaints
from armillary.session.misfit import other_job
from armillary.session.train_job import TrainJob

__all__ = ["owned_misfit"]

BY = PLAIN["replicated"]


def owned_misfit(plan: Plan, job: TrainJob, workers: int) -> str:
    """The first complaint, with its remedy; empty if there is none."""
    return next(_complaints(plan, job, workers), "")


def _complaints(plan: Plan, job: TrainJob, workers: int) -> Iterator[str]:
    name = plan.schedule.name
    if lacking := [what for what in ("loss", "example") if getattr(job, what) is None]:
        yield (
            f"schedule {name} owns the loop and needs {' and '.join(lacking)}: attach(plan, model, optimizer, "
            f"loss=loss, example=micro_batch), then run.step(micro_batches); or plan without a schedule"
        )
    if len(members(job.optimizer)) > 1:
        yield (
            f"schedule {name} owns the loop and steps one optimizer, got {kind_of(job.optimizer)}; make one, "
            "with groups of parameters, or plan without a schedule"
        )
    if job.scaler is not None and job.scaler.is_enabled():
        yield (
            f"schedule {name} cannot have a GradScaler, as its stages are stepped at different times, before anybody "
            f"knows whether all gradients of the step are finite; use bfloat16, which needs no scaling"
        )
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    yield from other_job(plan, trainable, workers)
    if any(tensor.is_meta for tensor in [*job.model.parameters(), *job.model.buffers()]):
        yield f"schedule {name} cannot begin from a model on the meta device; build it on a real one"
    options = options_of(plan)
    if options.method.is_cut:
        yield from _unfit_optimizer(options, job.optimizer)
        yield from table_complaints(plan, options, trainable, job.optimizer)
    else:
        yield from _unfit_groups(plan, trainable)


def _unfit_optimizer(options: ScheduleOptions, optimizer: Optimizer) -> Iterator[str]:
    """Why an optimizer cannot have a plan's remedies."""
    said = [remedy.unfit(group) for remedy in options.built_remedies() for group in optimizer.param_groups]
    yield from filter(None, said)


def _unfit_groups(plan: Plan, trainable: dict[str, nn.Parameter]) -> Iterator[str]:
    """What an edited plan's groups ask for that cannot be done."""
    for group in plan.groups:
        if group.exchange != BY:
            yield f"group {group.name!r} goes by {group.exchange}; this schedule knows {BY} only"
        kinds = sorted({f"{trainable[name].dtype} on {trainable[name].device}" for name in group.parameters})
        if len(kinds) > 1:
            yield f"group {group.name!r} holds {' and '.join(kinds)}, which do not fit in one bucket; split the group"
