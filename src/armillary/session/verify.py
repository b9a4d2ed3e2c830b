"""Trains a workload twice, in one process and on all workers under a plan, and compares every tensor.

The one process is plain PyTorch over the same per-worker batches (`reference/serial.py`), which knows no exchange and
no runtime. In float64 the two must agree to rounding. Every exchange is forced in turn, not only the one that a plan
chooses. What departs from exact is compared with its own oracle (`session/truth.py`).

What an exchange puts off (a warm start, a lifespan) is lowered. A plan is trained until all that its exchanges do was
done twice, or for `LONGER` times the steps. `verify` does it for a script's own model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import dense_exchanges, row_exchanges
from armillary.planning.demand import PRICE, Constraint
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.planning.stage_costs import EdgeRequest
from armillary.plans.choice import Choice
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.registry import Registry
from armillary.plans.requests import summed
from armillary.prefetch.batches import leaves
from armillary.profiler.probe import Loss
from armillary.schedules.method import OWNED_LOOP, PARAMETER_SERVER
from armillary.schedules.registry import SCHEDULES, owns_loop
from armillary.session.attach import attach
from armillary.session.data_check import alike_ranks
from armillary.session.double_precision import InDouble, uniform_plan
from armillary.session.plan_job import JobRequest, model_to_plan, open_transport, plan_job
from armillary.session.run import Run
from armillary.session.truth import SeededBatch, Truth, coded_rows, departs, one_process, replicas, seeded_loss
from armillary.session.verification import (
    TOLERANCE,
    Acted,
    Acts,
    Difference,
    Verdict,
    Verification,
    acts_of,
    lowered,
    shortened,
    watched,
)
from armillary.session.verify_replay import verify_replay
from armillary.session.verify_schedule import verify_schedule
from armillary.session.workload import Script, TrainBatches, Workload, stream_seed
from armillary.tables.handle import TableHandle
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify", "verify_workload"]

TWICE = 2
LONGER = 4


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
    if owns_loop(decided.plan.schedule):
        if global_batch is not None:
            raise ValueError("verify: a schedule that owns the loop keeps micro-batches apart; drop the global batch")
        plan = shortened(decided.plan)
        held = VERIFIERS[SCHEDULES[plan.schedule.name].step_mode]
        found = held(double, plan, steps, seed, every_bit)
        return replace(found, lowered=lowered(decided.plan, plan))
    plans = {"planned": shortened(decided.plan)}
    exact = [name for name, entry in {**dense_exchanges(), **row_exchanges()}.items() if not entry.departs]
    names = exact if exchanges == "every" else exchanges
    plans |= {name: uniform_plan(decided.profile, Choice(name), decided.plan.workers_per_node) for name in names}
    plans = _distinct(plans)
    one, places = (double, decided.plan.workers) if global_batch is None else (InDouble(global_batch), 1)
    serial: dict[int, Truth] = {}  # by steps
    differences, acted, longest = list[Difference](), list[Acted](), steps
    for name, plan in plans.items():
        trained = _train(double, plan, steps, seed)
        transport, taken = trained.run._transport, trained.steps
        if departs(plan):
            truth = by_rank_zero(transport, partial(replicas, double, plan, taken, seed))
        else:
            if taken not in serial:
                serial[taken] = by_rank_zero(transport, partial(one_process, one, places, taken, seed))
            truth = serial[taken]
        differences += _compare(trained.run, name, truth)
        acted += [Acted(name, *key, times) for key, times in trained.acts.items()]
        longest = max(longest, taken)
    said = lowered(decided.plan, plans["planned"])
    nodes = decided.plan.workers // decided.plan.workers_per_node
    return Verification(
        workload.name, decided.plan.workers, longest, TOLERANCE, tuple(differences), "", tuple(acted), said, nodes=nodes
    )


Verify = Callable[[Workload, Plan, int, int, bool | None], Verification]
VERIFIERS: Registry[Verify] = Registry("verification of a driver", __name__)
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


def _compare(run: Run, name: str, truth: Truth) -> Iterator[Difference]:
    """Ends the run."""
    found, plan = dict(_whole(run)), run.plan
    mine = [_relative(found[parameter], truth.of(run.rank)[parameter]) for parameter in plan.parameters]
    largest = run._transport.agree_largest(mine)
    run.close(gather=False)
    for parameter, difference in zip(plan.parameters, largest, strict=True):
        verdict: Verdict = "equal" if difference <= TOLERANCE else "differs"
        if parameter in truth.quiet:
            verdict = "no gradient"
        group = plan.group_of(parameter)
        is_other = departs(plan) and bool(group.departures)
        yield Difference(parameter, name, str(group.exchange), difference, verdict, is_other)


class _Trained(NamedTuple):
    run: Run
    acts: Acts
    steps: int


def _train(workload: Workload, plan: Plan, steps: int, seed: int) -> _Trained:
    """For so many steps; longer while something happened less than twice and there are steps to take."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    run = attach(plan, model, optimizer, check_order=True)
    mine, acts = watched(run), Acts()
    feed = TrainBatches(workload, (run.rank, run.workers), seed)
    most, taken = max(steps, min(LONGER * steps, workload.steps)), 0
    for step, batch in enumerate(islice(feed, most)):
        optimizer.zero_grad(set_to_none=True)
        seeded_loss(workload, model, SeededBatch(stream_seed(seed, step, run.rank), batch)).backward()
        optimizer.step()
        taken = step + 1
        if taken >= steps:
            acts = acts_of(run._transport.share(mine))
            if min(acts.values(), default=TWICE) >= TWICE:
                break
    run._engine.finish()
    return _Trained(run, acts, taken)


def _whole(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as this rank sees it, by plain look-ups where it is owned by rows. What a look-up codes, its
    owners tell: it is the rows themselves that are compared."""
    coded = coded_rows(run.plan)
    with torch.no_grad():
        for name, parameter in run._model.named_parameters():
            if not isinstance(parameter, TableHandle):
                yield name, parameter.detach()
            elif name in coded:
                yield name, _told(run, name)
            else:
                yield name, parameter[torch.arange(len(parameter))]


def _told(run: Run, name: str) -> Tensor:
    """Collective: a whole table, each row as its owner has it."""
    table = run._engine.tables[name]
    whole = table.shard.new_zeros(table.shape)
    whole[table.ownership.ids(table.place.rank, torch.arange(len(table.shard)))] = table.rows
    total: Tensor = run._transport.complete(summed(whole), name)
    return total


def _relative(found: Tensor, true: Tensor) -> float:
    """|found - true| / |true| in norm; infinite where it is not a number."""
    difference = float((found - true).norm()) / (float(true.norm()) or 1.0)
    return difference if difference == difference else float("inf")


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
