"""What speaks against carrying out a plan whose schedule owns the loop, found before anything is touched.

Refused are habits of a loop that it cannot serve. Its gradients are computed on copies of the parameters, so no
parameter's own hook hears of them. Its stages are stepped at different times, each with the options of its gradients'
step.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, dense_exchanges, row_exchanges
from armillary.models.structure import marked
from armillary.planning.constraints import PLAIN
from armillary.plans.choice import Choice
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.runtime.bucket import layout_beside
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of, tables_stay_whole
from armillary.session.job import TrainJob
from armillary.session.validation import other_job
from armillary.stages.optimizer_step import own_options
from armillary.tables.handle import why_fixed
from armillary.tables.optimizer_trial import wants_listed_rows, why_not_by_parameter, why_not_by_row
from armillary.tables.optimizers import hooks_beside, kind_of, members
from armillary.transport.transport import Transport

__all__ = [
    "gradient_hooks",
    "joins_parameters",
    "of_optimizer",
    "owned_misfit",
    "pushed_misfit",
    "step_hooks",
    "unserved",
]

OWN_LOOP = "keep a loop of your own, by a plan without a schedule"


def unserved(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """What speaks against steps by `run.step`, with its remedy."""
    yield from gradient_hooks(dict(model.named_parameters()))
    yield from of_optimizer(optimizer)


def of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    """What speaks against any schedule that owns the loop, also behind a loop of the user's."""
    yield from step_hooks(optimizer)
    for one in members(optimizer):
        if found := own_options(one):
            yield (
                f"{type(one).__name__} changes its options {', '.join(found)} when it steps, as a trial shows, which "
                f"would be undone; take one that keeps such numbers in its state, or {OWN_LOOP}"
            )


def joins_parameters(optimizer: Optimizer) -> Iterator[str]:
    """What speaks against a schedule that steps the stages of a model apart."""
    for one in members(optimizer):
        reasons = [why_not_by_parameter(one, group) for group in one.param_groups if group["params"]]
        if why := next(filter(None, reasons), ""):
            yield (
                f"its stages are stepped apart, which {type(one).__name__} cannot be: {why}; take one that steps each "
                f"parameter by itself, clip by the schedule's clip_norm, or {OWN_LOOP}"
            )


def gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Hooks of the user's, that wait for gradients of parameters, by name."""
    with torch._C.DisableTorchFunctionSubclass():  # tables, too, are asked plainly
        hooked = [name for name, one in parameters.items() if _is_hooked(one) and one.requires_grad]
        if hooked:
            more = f" (and so have {len(hooked) - 1} more)" if len(hooked) > 1 else ""
            yield (
                f"{hooked[0]} has a gradient hook ({_names(_hooks(parameters[hooked[0]]))}){more}, which no step would "
                f"call; take it off, or {OWN_LOOP}"
            )


def step_hooks(optimizer: Optimizer, mine: Container[int] = ()) -> Iterator[str]:
    """Hooks of the user's, that run with the optimizer's steps. mine: ids of the run's own.

    A step of training steps the optimizer once a stage, or once more before the model is looked at.
    """
    if hooks := hooks_beside(optimizer, mine):
        yield (
            f"{kind_of(optimizer)} has a step hook ({_names(hooks)}), which would not run once a step with all its "
            "gradients, and whose changes of options would be undone; take it off, and do its work after each step"
        )


def _is_hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    return [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]


def _names(hooks: Iterable[Callable[..., Any]]) -> str:
    return ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)


BY = PLAIN["replicated"]


def owned_misfit(plan: Plan, job: TrainJob, workers: int) -> str:
    """The first complaint, with its remedy; empty if there is none."""
    return next(_complaints(plan, job, workers), "")


def pushed_misfit(plan: Plan, job: TrainJob, transport: Transport) -> str:
    """The first complaint of owners that step with pushes, with its remedy; empty if there is none."""
    return next(_pushed_complaints(plan, job, transport), "")


def _pushed_complaints(plan: Plan, job: TrainJob, transport: Transport) -> Iterator[str]:
    name = plan.schedule.name
    if job.loss is None:
        yield (
            f"schedule {name} owns the loop and needs loss: attach(plan, model, optimizer, loss=loss, example=batch), "
            "then run.step([batch]); or plan without a schedule"
        )
    if transport.check_order:
        yield f"schedule {name} cannot have check_order=True: its ranks send when they come, in no common order"
    if job.scaler is not None and job.scaler.is_enabled():
        yield (
            f"schedule {name} cannot have a GradScaler, as no rank knows of the others' steps, which of them to skip "
            "among them; use bfloat16, which needs no scaling"
        )
    if job.check_finite:
        yield f"schedule {name} cannot have check_finite=True; look at the losses that run.step returns"
    running = [path for path, one in job.model.named_modules() if getattr(one, "running_mean", None) is not None]
    if running:
        yield (
            f"schedule {name} has no statistics of all ranks' batches, which {running[0]} (BatchNorm) keeps; take "
            "GroupNorm or LayerNorm, or plan without a schedule"
        )
    if mark := marked(job.model):
        yield f"schedule {name} owns the loop, and the model {mark}"
    if len(members(job.optimizer)) > 1:
        yield f"schedule {name} steps one optimizer, got {kind_of(job.optimizer)}; make one with groups of parameters"
    yield from (f"schedule {name} owns the loop, and {one}" for one in unserved(job.model, job.optimizer))
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    yield from other_job(plan, trainable, transport.place.workers)
    if away := {tensor.device.type for tensor in [*job.model.parameters(), *job.model.buffers()]} - {"cpu"}:
        yield f"schedule {name} trains on the CPU alone, and the model lies on {min(away)}"
    yield from _unlistable(name, job.optimizer)
    yield from (f"schedule {name}: {one}" for one in joins_parameters(job.optimizer))
    for group in plan.groups:
        if group.layout == "row_sharded" and (why := _mixes_rows(group, trainable, job.optimizer)):
            yield f"schedule {name}: {group.name} cannot go by row, as {kind_of(job.optimizer)} {why}; plan again"


def _mixes_rows(group: Group, trainable: Mapping[str, nn.Parameter], optimizer: Optimizer) -> str:
    """Why the optimizer cannot step the group's rows apart; empty if it can."""
    table = trainable[group.parameters[0]]
    options = next((one for one in optimizer.param_groups if any(held is table for held in one["params"])), None)
    return "" if options is None else why_not_by_row(optimizer, options, table) or why_fixed(table)


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
