"""What speaks against carrying out a plan whose schedule owns the loop, found before anything is touched."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, dense_exchanges, row_exchanges
from armillary.facts.marks import marked
from armillary.facts.plan import Choice, Group, Plan
from armillary.planning.parallax import PLAIN
from armillary.runtime.hybrid.bucket import layout_beside
from armillary.runtime.hybrid.optimizer_trial import wants_listed_rows
from armillary.runtime.hybrid.optimizers import kind_of, members
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of, tables_stay_whole
from armillary.session.owned_habits import joins_parameters, of_optimizer, unserved
from armillary.session.train_job import TrainJob
from armillary.session.validation import other_job

__all__ = ["owned_misfit"]

BY = PLAIN["replicated"]


def owned_misfit(plan: Plan, job: TrainJob, workers: int) -> str:
    """The first complaint, with its remedy; empty if there is none."""
    return next(_complaints(plan, job, workers), "")


def _complaints(plan: Plan, job: TrainJob, workers: int) -> Iterator[str]:
    name = plan.schedule.name
    options = options_of(plan)
    lacking = [what for what in ("loss", "example") if getattr(job, what) is None]
    if lacking and (options.method.is_cut or len(lacking) == 1):
        yield (
            f"schedule {name} owns the loop and needs {' and '.join(lacking)}: attach(plan, model, optimizer, "
            f"loss=loss, example=micro_batch), then run.step(micro_batches); or plan without a schedule"
        )
    if mark := marked(job.model):
        yield f"schedule {name} owns the loop, and the model {mark}"
    if len(members(job.optimizer)) > 1:
        yield (
            f"schedule {name} owns the loop and steps one optimizer, got {kind_of(job.optimizer)}; plan without a "
            "schedule, where several optimizers work together, or make one with groups of parameters"
        )
    if job.scaler is not None and job.scaler.is_enabled():
        yield (
            f"schedule {name} cannot have a GradScaler, as its stages are stepped at different times, before anybody "
            f"knows whether all gradients of the step are finite; use bfloat16, which needs no scaling"
        )
    if job.check_finite:
        yield (
            f"schedule {name} owns the loop and cannot have check_finite=True; look at the losses that run.step "
            "returns, or at those of run.evaluate"
        )
    habits = of_optimizer(job.optimizer) if job.loss is None else unserved(job.model, job.optimizer)
    yield from (f"schedule {name} owns the loop, and {one}" for one in habits)
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    yield from other_job(plan, trainable, workers)
    if any(tensor.is_meta for tensor in [*job.model.parameters(), *job.model.buffers()]):
        yield f"schedule {name} cannot begin from a model on the meta device; build it on a real one"
    yield from _unlistable(name, job.optimizer)
    if options.method.is_cut:
        yield from (f"schedule {name}: {one}" for one in joins_parameters(job.optimizer))
        yield from _unfit_optimizer(options, job.optimizer)
        yield from _unfit_exchanges(plan, options, trainable)
    else:
        yield from _unfit_groups(plan, trainable)


def _unlistable(name: str, optimizer: Optimizer) -> Iterator[str]:
    """Gradients of a schedule are plain."""
    if any(wants_listed_rows(optimizer, group) for group in optimizer.param_groups if group["params"]):
        yield (
            f"schedule {name} gives plain gradients, and {kind_of(optimizer)} takes only those that list rows; take "
            "Adam, or keep a loop of your own, by a plan without a schedule"
        )


def _unfit_optimizer(options: ScheduleOptions, optimizer: Optimizer) -> Iterator[str]:
    """Why an optimizer cannot have a plan's staleness corrections."""
    said = [correction.unfit(group) for correction in options.built_corrections() for group in optimizer.param_groups]
    yield from filter(None, said)


def _unfit_exchanges(plan: Plan, options: ScheduleOptions, trainable: dict[str, nn.Parameter]) -> Iterator[str]:
    """What an edited plan's groups ask for that cannot be done."""
    is_shared = options.replicas(plan.workers) > 1 or any(group.exchange is not None for group in plan.groups)
    for group in plan.groups if is_shared else ():
        if group.exchange is None:
            yield f"group {group.name!r} has no exchange, and its stage's gradients go by exchanges; give it {BY}"
        elif group.exchange.name in row_exchanges():
            yield f"group {group.name!r} goes by {group.exchange}; {tables_stay_whole(plan.schedule, group.parameters)}"
        elif not options.method.has_exchanges:
            yield f"group {group.name!r} goes by {group.exchange}; schedule {options.name} knows no exchanges: drop it"
        else:
            yield from _unfit_exchange(group, group.exchange, trainable)


def _unfit_exchange(group: Group, choice: Choice, trainable: dict[str, nn.Parameter]) -> Iterator[str]:
    exchange = build_dense(choice.name, **choice.options)  # refuses a name that there is not
    if missing := set(dense_exchanges()[choice.name].departs) - set(group.departures):
        yield f"group {group.name!r} by {choice} departs: {', '.join(sorted(missing))}; edit the plan to say so"
    if not exchange.keeps_replicas_alike:
        yield f"group {group.name!r} goes by {choice}, which lets ranks of one stage differ; edit the plan"
    members = [trainable[name] for name in group.parameters]
    if complaint := _several_kinds(group, members):
        yield complaint
    elif reason := exchange.refuses(layout_beside(members, group.parameters, exchange.align)):
        yield f"group {group.name!r} cannot go by {choice}: {reason}; edit the plan, or plan again"


def _several_kinds(group: Group, members: Sequence[nn.Parameter]) -> str:
    kinds = sorted({f"{one.dtype} on {one.device}" for one in members})
    if len(kinds) == 1:
        return ""
    return f"group {group.name!r} holds {' and '.join(kinds)}, which do not fit in one bucket; split the group"


def _unfit_groups(plan: Plan, trainable: dict[str, nn.Parameter]) -> Iterator[str]:
    """What an edited plan's groups ask for that cannot be done."""
    for group in plan.groups:
        if group.exchange != BY:
            yield f"group {group.name!r} goes by {group.exchange}; this schedule knows {BY} only"
        if complaint := _several_kinds(group, [trainable[name] for name in group.parameters]):
            yield complaint
