"""What speaks against carrying out a plan on this model with this optimizer: for every driver a row of checks.

A check yields complaints, each with its remedy; the first of them all is told, before anything is touched. Where a
schedule owns the loop, habits of a loop are refused that it cannot serve. Its gradients are computed on copies of the
parameters, so no parameter's own hook hears of them. Its stages are stepped at different times, each with the options
of its gradients' step.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.all_reduce import all_reduce
from armillary.exchanges.dense import DenseExchange, why_not_beside
from armillary.exchanges.exchange import (
    RowExchange,
    build_dense,
    build_row,
    consensus_of,
    dense_exchanges,
    row_exchanges,
)
from armillary.models.structure import marked
from armillary.planning.constraints import PLAIN
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.runtime.bucket import layout_beside
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of as schedule_of
from armillary.schedules.registry import tables_stay_whole, why_not_carried
from armillary.session.job import TrainJob
from armillary.session.validation import NOT_HELD, dtype_of, other_job
from armillary.stages.optimizer_step import own_options
from armillary.tables.handle import why_fixed
from armillary.tables.optimizer_trial import (
    leaves_untouched_rows,
    wants_listed_rows,
    why_not_by_parameter,
    why_not_by_row,
    why_whole,
)
from armillary.tables.optimizers import holder, hooks_beside, kind_of, members, options_of
from armillary.transport.transport import Transport

__all__ = [
    "OF_HOOKS",
    "OF_OWNERS",
    "OF_SCHEDULES",
    "Check",
    "PlanQuestion",
    "gradient_hooks",
    "joins_parameters",
    "step_hooks",
    "unserved",
    "why_unfit",
]

OWN_LOOP = "keep a loop of your own, by a plan without a schedule"
BY = PLAIN["replicated"]


@dataclass(frozen=True)
class PlanQuestion:
    """May this plan be carried out? transport: over which; it asks nobody."""

    plan: Plan
    job: TrainJob
    transport: Transport

    @property
    def name(self) -> str:
        return self.plan.schedule.name

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    @cached_property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in self.job.model.named_parameters() if one.requires_grad}

    @cached_property
    def options(self) -> ScheduleOptions:
        return schedule_of(self.plan)


Check = Callable[[PlanQuestion], Iterator[str]]


def why_unfit(checks: Iterable[Check], question: PlanQuestion) -> str:
    """The first thing that speaks against the plan, with its remedy; empty if there is none."""
    return next((one for check in checks for one in check(question) if one), "")


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


def _other_nodes(question: PlanQuestion) -> Iterator[str]:
    """Connections that are made for other nodes than the plan's."""
    wanted, there = question.plan.workers_per_node, question.transport.place.workers_per_node
    if wanted != there:
        yield (
            f"the transport given has nodes of {there}, the plan wants nodes of {wanted}; make it with "
            f"Transport(workers_per_node={wanted})"
        )


def _other_job(question: PlanQuestion) -> Iterator[str]:
    yield from other_job(question.plan, question.trainable, question.workers)


def _uncarried(question: PlanQuestion) -> Iterator[str]:
    yield why_not_carried(question.plan.schedule)


def _groups_of_hooks(question: PlanQuestion) -> Iterator[str]:
    plan, optimizer = question.plan, question.job.optimizer
    for group in plan.groups:
        if group.own_exchange.name in row_exchanges():
            yield from _row_complaints(group, question.trainable[group.parameters[0]], optimizer)
            continue
        choice, entry = group.own_exchange, dense_exchanges().get(group.own_exchange.name)
        exchange = build_dense(choice.name, **choice.options)  # refuses a name that there is not
        assert entry is not None
        said, told = (group.departures, group.cadence), (entry.departs, exchange.cadence)
        if said != told:
            yield (
                f"group {group.name!r} by {choice} says departures {said[0]} and cadence {said[1]!r}, the exchange "
                f"says {told[0]} and {told[1]!r}; edit the plan, or plan with a constraint"
            )
        yield from _no_bucket(group, exchange, question.trainable)
        yield why_not_beside(choice, exchange, plan.mean, plan.workers_per_node)
    if plan.consensus != (consensus := consensus_of(plan.groups)):
        yield f"the plan's consensus is {plan.consensus!r}; under its exchanges it is {consensus!r}: edit the plan"


def _no_bucket(group: Group, exchange: DenseExchange, trainable: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Why a group's parameters cannot lie in one bucket, or its exchange not carry it."""
    members = [trainable[name] for name in group.parameters]
    kinds = sorted({f"{dtype_of(one)} on {one.device}" for one in members})
    if len(kinds) > 1:
        yield f"group {group.name!r} holds {' and '.join(kinds)}, which do not fit in one bucket; split the group"
    if reason := exchange.refuses(layout_beside(members, group.parameters, exchange.align)):
        yield f"group {group.name!r} cannot go by {group.exchange}: {reason}; edit the plan, or plan again"


def _apart(question: PlanQuestion) -> Iterator[str]:
    """What asks all ranks in every step, where weights meet and ranks train apart in between."""
    plan, job = question.plan, question.job
    choices = [group.own_exchange for group in plan.groups if group.own_exchange.name in dense_exchanges()]
    meeting = [one for one in choices if build_dense(one.name, **one.options).carries == "weights"]
    if meeting and job.scaler is not None and job.scaler.is_enabled():
        yield (
            f"a GradScaler asks all ranks in every step whether to skip it, and under {meeting[0]} each trains alone; "
            "use bfloat16, which needs no scaling"
        )
    if meeting and job.check_finite:
        yield (
            f"check_finite=True asks all ranks in every step, and under {meeting[0]} each trains alone; drop it: a "
            "rank whose weights are not finite raises at its next meeting"
        )


def _row_complaints(group: Group, parameter: nn.Parameter, optimizer: Optimizer) -> Iterator[str]:
    """What speaks against exchanging a parameter by row as a group says."""
    optimizer = holder(optimizer, parameter)
    name, kind = group.parameters[0], type(optimizer).__name__
    exchange: RowExchange = build_row(group.own_exchange.name, **group.own_exchange.options)
    if group.layout != exchange.placement:
        yield (
            f"group {group.name!r} is {group.layout}, but {group.exchange} is for {exchange.placement} tables; edit "
            "the plan"
        )
    if ("lossy" in group.departures) != ("lossy" in exchange.codes.departs):
        yield (
            f"group {group.name!r} by {group.exchange} says departures {group.departures}, the exchange says "
            f"{exchange.codes.departs}; edit the plan, or plan with a constraint"
        )
    item_bytes = parameter.element_size()
    if reason := exchange.codes.refuses(parameter.shape[1:].numel() * item_bytes, item_bytes):
        yield f"group {group.name!r} cannot go by {group.exchange}: {reason}; edit the plan"
    if len(group.parameters) > 1:
        yield f"group {group.name!r}: {group.exchange} takes one table, got {group.parameters}; make a group of each"
    options = options_of(optimizer, parameter)
    if options is None:
        yield f"{name!r} is exchanged by row but {NOT_HELD}"
        return
    if fixed := why_fixed(parameter):
        yield (
            f"{name!r} is to be read by row, so the parameter object must become the table's handle, but {fixed}, or "
            f"plan with {{{name!r}: {all_reduce.__name__!r}}}"
        )
    why_not = why_not_by_row if exchange.placement == "row_sharded" or group.is_lazy else why_whole
    if reason := why_not(optimizer, options, parameter):
        yield (
            f"{name!r} is updated by row but {kind} {reason}; use an element-wise optimizer, or plan with "
            f"{{{name!r}: {('replicated' if why_not is why_not_by_row else all_reduce.__name__)!r}}}"
        )
    elif complaint := _early_complaint(group, exchange, optimizer, options):
        yield complaint


def _early_complaint(group: Group, exchange: RowExchange, optimizer: Optimizer, options: Mapping[str, Any]) -> str:
    """Rows may go before a step, and gradients after it, only if the optimizer leaves alone rows without a gradient."""
    if group.prefetch not in ("rows", "gradients"):
        return ""
    if exchange.pull_early is None:
        return f"group {group.name!r}: {group.own_exchange} cannot send rows before the step; set prefetch='ids'"
    if group.prefetch == "gradients" and exchange.part is None:
        return f"group {group.name!r}: {group.own_exchange} cannot send gradients in two parts; set prefetch='rows'"
    if group.is_lazy or leaves_untouched_rows(optimizer, dict(options)):
        return ""
    return (
        f"group {group.name!r}: {type(optimizer).__name__} with these options moves rows that get no gradient, so none "
        "can be sent before the step; set prefetch='ids'"
    )


def _lacking(question: PlanQuestion) -> Iterator[str]:
    """What neither cuts nor has owners goes behind a loop of the user's, too, which takes the loss itself."""
    job, method = question.job, question.options.method
    if method.placement.deals_rows:  # owners, who never cut a model and step with every batch
        wanted, given = ["loss"], "loss=loss), then run.step([batch])"
    else:
        wanted, given = ["loss", "example"], "loss=loss, example=micro_batch), then run.step(micro_batches)"
    lacking = [what for what in wanted if getattr(job, what) is None]
    if lacking and (method.is_cut or len(lacking) == 1):
        yield (
            f"schedule {question.name} owns the loop and needs {' and '.join(lacking)}: attach(plan, model, optimizer, "
            f"{given}; or plan without a schedule"
        )


def _unserved_loop(question: PlanQuestion) -> Iterator[str]:
    job, who = question.job, f"schedule {question.name} owns the loop"
    if mark := marked(job.model):
        yield f"{who}, and the model {mark}"
    if len(members(job.optimizer)) > 1:
        yield (
            f"{who} and steps one optimizer, got {kind_of(job.optimizer)}; plan without a schedule, where several "
            "optimizers work together, or make one with groups of parameters"
        )
    if job.scaler is not None and job.scaler.is_enabled():
        yield (
            f"schedule {question.name} cannot have a GradScaler, as it steps before anybody knows whether all "
            "gradients of the step are finite; use bfloat16, which needs no scaling"
        )
    if job.check_finite:
        yield (
            f"{who} and cannot have check_finite=True; look at the losses that run.step returns, or at those of "
            "run.evaluate"
        )
    habits = of_optimizer(job.optimizer) if job.loss is None else unserved(job.model, job.optimizer)
    yield from (f"{who}, and {one}" for one in habits)


def _of_model(question: PlanQuestion) -> Iterator[str]:
    tensors = [*question.job.model.parameters(), *question.job.model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        yield f"schedule {question.name} cannot begin from a model on the meta device; build it on a real one"
    if question.options.method.placement.deals_rows and (away := {tensor.device.type for tensor in tensors} - {"cpu"}):
        yield f"schedule {question.name} trains on the CPU alone, and the model lies on {min(away)}"


def _unlistable(question: PlanQuestion) -> Iterator[str]:
    """Gradients of a schedule are plain."""
    optimizer = question.job.optimizer
    if any(wants_listed_rows(optimizer, group) for group in optimizer.param_groups if group["params"]):
        yield (
            f"schedule {question.name} gives plain gradients, and {kind_of(optimizer)} takes only those that list "
            "rows; take Adam, or keep a loop of your own, by a plan without a schedule"
        )


def _stepped_apart(question: PlanQuestion) -> Iterator[str]:
    if question.options.method.is_cut or question.options.method.placement.deals_rows:
        yield from (f"schedule {question.name}: {one}" for one in joins_parameters(question.job.optimizer))


def _uncorrected(question: PlanQuestion) -> Iterator[str]:
    """Why an optimizer cannot have a plan's staleness corrections."""
    for correction in question.options.built_corrections():
        yield from filter(None, map(correction.unfit, question.job.optimizer.param_groups))


def _groups_of_stages(question: PlanQuestion) -> Iterator[str]:
    """What an edited plan's groups ask for that cannot be done."""
    plan, options = question.plan, question.options
    is_shared = options.replicas(plan.workers) > 1 or any(group.exchange is not None for group in plan.groups)
    for group in plan.groups:
        choice = group.exchange
        if not options.method.is_cut:
            if choice != BY:
                yield f"group {group.name!r} goes by {choice}; this schedule knows {BY} only"
                continue
        elif not is_shared:
            continue
        if choice is None:
            yield f"group {group.name!r} has no exchange, and its stage's gradients go by exchanges; give it {BY}"
        elif choice.name in row_exchanges():
            yield f"group {group.name!r} goes by {choice}; {tables_stay_whole(plan.schedule, group.parameters)}"
        elif options.method.is_cut and not options.method.has_exchanges:
            yield f"group {group.name!r} goes by {choice}; schedule {options.name} knows no exchanges: drop it"
        else:
            exchange = build_dense(choice.name, **choice.options)  # refuses a name that there is not
            if missing := set(dense_exchanges()[choice.name].departs) - set(group.departures):
                yield f"group {group.name!r} by {choice} departs: {', '.join(sorted(missing))}; edit the plan to say so"
            if not exchange.keeps_replicas_alike:
                yield f"group {group.name!r} goes by {choice}, which lets ranks of one stage differ; edit the plan"
            yield from _no_bucket(group, exchange, question.trainable)


def _no_road(question: PlanQuestion) -> Iterator[str]:
    """Stages that cannot send to one another from where they are."""
    away = {parameter.device.type for parameter in question.job.model.parameters()} - {"cpu", "meta"}
    away = {device for device in away if ("world", device) not in question.transport.groups}
    if not away or not question.options.method.is_cut or question.workers == 1:
        return
    device = min(away)
    yield (
        f"schedule: {question.name} sends activations from rank to rank, and gloo carries no messages of {device}"
        f" (it ends the process); start the process group with backend 'cpu:gloo,{device}:nccl' and a device for every"
        " rank, or leave it to Armillary; or train on the CPU"
    )


def _without_clock(question: PlanQuestion) -> Iterator[str]:
    """What asks all ranks for something between two calls that all make."""
    name, model = question.name, question.job.model
    if question.transport.check_order:
        yield f"schedule {name} cannot have check_order=True: its ranks send when they come, in no common order"
    running = [path for path, one in model.named_modules() if getattr(one, "running_mean", None) is not None]
    if running:
        yield (
            f"schedule {name} has no statistics of all ranks' batches, which {running[0]} (BatchNorm) keeps; take "
            "GroupNorm or LayerNorm, or plan without a schedule"
        )


def _rows_of_owners(question: PlanQuestion) -> Iterator[str]:
    optimizer = question.job.optimizer
    for group in question.plan.groups:
        if group.layout == "row_sharded" and (why := _mixes_rows(group, question.trainable, optimizer)):
            yield (
                f"schedule {question.name}: {group.name} cannot go by row, as {kind_of(optimizer)} {why}; plan again"
            )


def _mixes_rows(group: Group, trainable: Mapping[str, nn.Parameter], optimizer: Optimizer) -> str:
    """Why the optimizer cannot step the group's rows apart; empty if it can."""
    table = trainable[group.parameters[0]]
    options = next((one for one in optimizer.param_groups if any(held is table for held in one["params"])), None)
    return "" if options is None else why_not_by_row(optimizer, options, table) or why_fixed(table)


BY_RUN_STEP = (_other_nodes, _lacking, _unserved_loop, _other_job, _of_model, _unlistable, _stepped_apart)
OF_HOOKS: Sequence[Check] = (_other_nodes, _other_job, _uncarried, _groups_of_hooks, _apart)
OF_SCHEDULES: Sequence[Check] = (*BY_RUN_STEP, _uncorrected, _groups_of_stages, _no_road)
OF_OWNERS: Sequence[Check] = (*BY_RUN_STEP, _without_clock, _rows_of_owners)
