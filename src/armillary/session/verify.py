"""Trains a workload twice, in one process and on all workers under a plan, and compares every tensor.

In float64 the two must agree to rounding. Every exchange is forced in turn, not only the one that a plan chooses. What
departs from exact is compared with its own oracle (`session/truth.py`). What an exchange puts off (a warm start, a
lifespan) is lowered. `verify` does it for a script's own model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import dense_exchanges, row_exchanges
from armillary.planning.demand import PRICE, Constraint
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.planning.stage_costs import EdgeRequest
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.registry import Choice, Registry
from armillary.prefetch.batches import leaves
from armillary.profiler.probe import Loss
from armillary.schedules.method import OWNED_LOOP, PARAMETER_SERVER, USER_LOOP
from armillary.schedules.registry import SCHEDULES
from armillary.session.data_check import alike_ranks
from armillary.session.double_precision import InDouble, uniform_plan
from armillary.session.plan_job import JobRequest, model_to_plan, open_transport, plan_job
from armillary.session.verification import Judged, Verification, VerifiedCase, lowered, shortened
from armillary.session.verifiers import verify_hooks, verify_replay, verify_schedule
from armillary.session.workload import Script, Workload

__all__ = ["verify", "verify_workload"]


def verify_workload(
    workload: Workload,
    *,
    steps: int = 5,
    seed: int = 0,
    request: JobRequest | None = None,
    exchanges: Sequence[str] | Literal["every"] = "every",
    global_batch: Workload | None = None,
    every_bit: bool | None = None,
) -> Verification:
    """Compares the plan and every forced exchange with one process; every rank must call it.

    Args:
        request: of the plan, as in training.
        exchanges: to force besides; "every" exact one. One that carries nothing otherwise than an earlier plan is left
            out.
        global_batch: the same workload with a batch of all workers together. Given, the one process takes steps on
            that, which is equal only without batch statistics, per-worker randomness and cross-sample losses.
        every_bit: wanted of a schedule that owns the loop, which is held to the same schedule in one process; None: if
            MKL's reproducible mode is set on every rank.

    Raises:
        ValueError: what is asked cannot be granted.
    """
    double = InDouble(workload)
    decided = plan_job(model_to_plan(double, seed), request or JobRequest())
    plan = shortened(decided.plan)
    driver = SCHEDULES[plan.schedule.name].step_mode
    plans, held = {"planned": plan}, VERIFIERS.all().get(driver, verify_schedule)
    if held is verify_hooks:
        exact = [name for name, entry in {**dense_exchanges(), **row_exchanges()}.items() if not entry.departs]
        names = exact if exchanges == "every" else exchanges
        plans |= {name: uniform_plan(decided.profile, Choice(name), plan.workers_per_node) for name in names}
    elif global_batch is not None:
        raise ValueError(
            f"verify: no step of schedule {plan.schedule.name} is one on the batch of all workers together; drop the "
            "global batch"
        )
    case = VerifiedCase(
        double, plan, steps, seed, "", every_bit, None if global_batch is None else InDouble(global_batch)
    )
    found = [held(replace(case, plan=one, label=name)) for name, one in _distinct(plans).items()]
    first, workers, per_node = found[0], plan.workers, plan.workers_per_node
    return Verification(
        workload.name, workers, max(one.steps for one in found), first.tolerance,
        tuple(row for one in found for row in one.differences), first.note,
        tuple(act for one in found for act in one.acted), lowered(decided.plan, plan), first.admitted,
        workers // per_node,
    )  # fmt: skip


VERIFIERS: Registry[Callable[[VerifiedCase], Judged]] = Registry("verification of a driver", __name__)
VERIFIERS.register(USER_LOOP, verify_hooks)
VERIFIERS.register(OWNED_LOOP, verify_schedule)
VERIFIERS.register(PARAMETER_SERVER, verify_replay)


def _distinct(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Without those that carry every parameter as an earlier one does."""
    seen, distinct = [], {}
    for name, plan in plans.items():
        way = {parameter: (group.exchange, group.departures) for group in plan.groups for parameter in group.parameters}
        if way not in seen:
            seen.append(way)
            distinct[name] = plan
    return distinct


def verify(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    plan: Plan | None = None,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    schedule: Choice | str = SIMULTANEOUS,
    rule: str = PRICE,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
    steps: int = 5,
    seed: int = 0,
    exchanges: Sequence[str] | Literal["every"] = "every",
) -> Verification:
    """Trains copies of the model on all workers and in one process, in float64, and compares every parameter. Every
    rank must call it; model and optimizer stay as they were. `print` it; `.is_equal` is the answer. What a loop does
    besides (clipping, schedulers, accumulation) is not tried.

    Args:
        batches: the same on every rank, as many as steps x workers; each is one worker's batch of one step.
        loss: loss(model, batch) -> scalar tensor, the mean over the batch.
        plan: to be held to the truth; without, one is made as in `auto_plan` (`constraints`, `lazy`,
            `schedule`, `rule`, `edge`, `edge_back`).
        exchanges: to be forced besides, one after the other; () for none.

    Raises:
        ValueError: too few batches, ranks with other batches, or a plan or something asked that does not fit.
    """
    if plan is not None and (edge or edge_back):
        raise ValueError("plan: a plan that is given says its own edges; edit its stages, or drop edge and edge_back")
    script = Script(model, optimizer, batches, loss, steps)
    transport = open_transport()
    workers = transport.place.workers
    first = list(islice(script.batches("train", 0, 1, seed), 1))
    alike = alike_ranks(first, transport)
    transport.close()
    if workers > 1 and leaves(first) and alike != [tuple(range(workers))]:
        raise ValueError(
            "verify: ranks draw other batches than rank 0; give every rank the same, unshuffled or "
            "shuffled by one seed: verify itself takes each worker's share"
        )
    next(script.batches("train", steps * workers - 1, workers, seed))  # the last: too few are told of on every rank
    request = PlanRequest(constraints, lazy, schedule=named(schedule), rule=rule, edge=edge, edge_back=edge_back)
    return verify_workload(script, steps=steps, seed=seed, request=JobRequest(request, plan), exchanges=exchanges)
