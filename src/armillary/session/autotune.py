"""Whole plans that the chosen one is held against, and a few steps of each in this job: the winner is carried out.

The alternatives: each way a table may cross the workers, for all tables that have it, with prefetch and without; and
buckets of several sizes. The planner prices tables one by one and hides nothing behind compute. Which of a few whole
plans is the fastest the simulator says, and better still a few steps of each, on copies of the model before step 0. A
forecast that is off by a tenth cannot tell two plans apart that differ by less. A few steps of each can, and cost less
than the choice between them is worth over a training. The copies are dropped, so training begins as it would have.

Source: Parallax (Kim et al., EuroSys 2019) searches its partitions by running the job; there each trial is a new
launch, here it is a turn in the job that is to be run.
"""

import copy
import itertools
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.models.preserved_state import untouched
from armillary.planning.grouping import counted, is_ownerless
from armillary.planning.planner import bucketings, explain
from armillary.planning.prefetch import prefetching
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.plan import Plan
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology, turn_bytes_on
from armillary.plans.units import seconds_text
from armillary.profiler.probe import Loss
from armillary.session.attach import attach_over
from armillary.session.hooks_state import steps_to_learn
from armillary.session.job import TrainJob
from armillary.session.run import Run
from armillary.transport.transport import Transport

__all__ = ["AHEAD", "CHOSEN", "alternatives", "at_once", "best", "by_simulation", "fastest", "with_prefetch"]

CHOSEN = "chosen"
EXACT = "chosen among the exact ones"
AHEAD = " + prefetch"


def alternatives(case: Case, request: PlanRequest) -> dict[str, Plan]:
    """The plan chosen by price, and one for every candidate of any table, by name.

    A table that does not offer a way, or for which the user demands another, keeps what the plan chose. Plans that do
    not fit in memory are left out, and so are those that come to the same as an earlier one. The chosen plan and any
    that keeps everything whole are there in buckets of other sizes, too. Where a departure is allowed and
    taken, the plan without it is among them.
    """
    chosen = bucketings(case, request)
    taken: dict[str, Choice] = {}
    offered: dict[str, dict[str, Choice]] = {}
    for verdict in explain(case, request):
        one = verdict.candidate
        if verdict.is_chosen:
            taken[one.parameter] = one.choice
        if not verdict.lost.startswith("constraint"):
            offered.setdefault(str(one.choice), {})[one.parameter] = one.choice
    found, exact = {CHOSEN: chosen}, replace(request, allow=())
    if chosen[0].departures and request.allow:
        found[EXACT] = bucketings(case, exact)
    for name, ways in offered.items():
        if {**taken, **ways} == taken:
            continue
        wanted = {**request.constraints, **taken, **ways}
        try:
            found[name] = bucketings(case, replace(exact, constraints=wanted))
        except ValueError:  # does not fit
            continue
    named = {name: sized[0] for name, sized in found.items()}
    for name, sized in found.items():
        if name == CHOSEN or all(is_ownerless(group.own_exchange) for group in sized[0].groups):
            named |= {f"{name} + {counted(other)}": other for other in sized[1:]}
    return named


def by_simulation(plans: Mapping[str, Plan], case: Case) -> list[str]:
    """The names of the plans, the shortest simulated step first."""
    return sorted(plans, key=lambda name: simulate(plans[name], case).step_seconds)


def with_prefetch(plans: Mapping[str, Plan], case: Case, *, may_wait: bool = True) -> dict[str, Plan]:
    """The plans, each followed by the same looking ahead where it has tables that can; may_wait as in `prefetching`."""
    found: dict[str, Plan] = {}
    for name, plain in plans.items():
        found[name] = plain
        ahead = prefetching(plain, case.profile, case.topology, may_wait=may_wait)
        if ahead is not plain:
            found[name + AHEAD] = ahead
    return found


def best(plans: Mapping[str, Plan], case: Case, count: int) -> dict[str, Plan]:
    """So many of them, the shortest simulated step first. Where there are plans that prefetch, the best of these and
    the best of the others are both among them: a clock that knows neither waits nor crowds favours prefetch."""
    order = by_simulation(plans, case)
    kinds = [[name for name in order if plans[name].looks_ahead == ahead] for ahead in (False, True)]
    first = [names[0] for names in kinds if names]
    others = [name for name in order if name not in first]
    kept = {*first, *others[: max(0, count - len(first))]}
    return {name: plans[name] for name in order if name in kept}


def at_once(plans: Mapping[str, Plan], case: Case) -> dict[str, Plan]:
    """Those that a rank can hold beside one another, each with a copy of the model, in the order given; at least the
    first. What is left out is said in the notes of the others. The user's own model is there, too, and once more while
    it is copied."""
    spare_bytes = float(case.topology.memory_bytes) - 2 * sum(fact.bytes for fact in case.profile.parameters)
    kept: dict[str, Plan] = {}
    for name, one in plans.items():
        spare_bytes -= one.forecast.memory_bytes
        if kept and spare_bytes < 0:
            break
        kept[name] = one
    if not (left := [name for name in plans if name not in kept]):
        return kept
    note = f"not timed, as no further copy of the model fits in memory: {', '.join(left)}"
    return {name: replace(one, notes=(*one.notes, note)) for name, one in kept.items()}


Steps = Generator[None, None, None]
WARM_STEPS, TIMED_STEPS = 2, 3
FEWEST_ROUNDS, MOST_ROUNDS = 4, 16  # of a turn of every plan
SIFTED_ROUNDS, FAR = 2, 1.5  # after so many, what takes so many times the shortest is timed no more
LONGEST_SECONDS = 5.0  # of turns, once the fewest rounds are done
NOISE = 0.03  # of a step: plans whose medians differ by less are not told apart by timing


def fastest(
    plans: Mapping[str, Plan],
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Sequence[Any],
    transport: Transport,
    topology: Topology | None = None,
) -> Plan:
    """The plan whose steps were the shortest, with what was measured in its notes. Every rank must call it; all
    get the same plan. Model, optimizer and random streams stay as they were; memory for copies of both is needed.

    Args:
        plans: by name, for this model, the best by forecast first. Those that prefetch take their batches from
            `run.batches`, the others do not.
        batches: of this rank, trained on by turns; of one alone, again and again, no row could go early.
        transport: for ranks to agree on; plans are timed on others, of the same ranks and as patient. topology: as in
            `attach`.

    Raises:
        ValueError: a rank has no batch, or a plan does not fit; on every rank.
    """
    if lacking := [rank for rank, count in enumerate(transport.share(len(batches))) if not count]:
        raise ValueError(f"ranks {lacking} have no batch to time plans with; give every rank two or more")
    with untouched(model):
        shared = _connections(plans, topology, transport)
        running = {
            name: _running(plan, model, optimizer, loss, batches, shared[plan.workers_per_node])
            for name, plan in plans.items()
        }
        turns = _turns({name: steps for name, (_, steps) in running.items()}, transport)
        for run, steps in running.values():
            steps.close()
            run.close(gather=False)
        for used in shared.values():
            used.close()
    winner = _winner(turns)
    return replace(plans[winner], notes=(*plans[winner].notes, f"{_said(turns)}; {winner} is carried out"))


def _turns(steps: Mapping[str, Steps], transport: Transport) -> dict[str, list[float]]:
    """Seconds a step of every plan in every round, alike on all ranks; fewer rounds of what was far behind."""
    names, turns, spent = list(steps), {name: list[float]() for name in steps}, 0.0
    for index in range(MOST_ROUNDS):  # another one first each time, so that none always follows the same
        if index == SIFTED_ROUNDS:
            names = _near(turns)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            turns[name].append(_turn(steps[name], transport))
            spent += turns[name][-1] * TIMED_STEPS
        if index + 1 >= FEWEST_ROUNDS and spent > LONGEST_SECONDS:
            break
    return turns


def _near(turns: Mapping[str, Sequence[float]]) -> list[str]:
    """Those that may yet turn out the fastest."""
    found = {name: statistics.median(taken) for name, taken in turns.items()}
    return [name for name in turns if found[name] <= FAR * min(found.values())]


def _to_the_end(turns: Mapping[str, Sequence[float]]) -> list[str]:
    """Those that took part in every round."""
    rounds = max(map(len, turns.values()))
    return [name for name, taken in turns.items() if len(taken) == rounds]


def _winner(turns: Mapping[str, Sequence[float]]) -> str:
    """The shortest median of those timed to the end; or the first, which the forecast prefers, if it is as short."""
    medians = {name: statistics.median(turns[name]) for name in _to_the_end(turns)}
    first, shortest = next(iter(medians)), min(medians, key=lambda name: medians[name])
    return first if medians[first] <= (1 + NOISE) * medians[shortest] else shortest


def _said(turns: Mapping[str, Sequence[float]]) -> str:
    """In words for the plan's notes."""
    times = {name: f"{name} {seconds_text(statistics.median(taken))}" for name, taken in turns.items()}
    last = _to_the_end(turns)
    steps = TIMED_STEPS * len(turns[last[0]])
    found = f"timed in this job over {steps} steps each: {', '.join(times[name] for name in last)}"
    if aside := [times[name] for name in turns if name not in last]:
        found += f"; over {TIMED_STEPS * SIFTED_ROUNDS}, then set aside: {', '.join(aside)}"
    return found


def _connections(plans: Mapping[str, Plan], topology: Topology | None, beside: Transport) -> dict[int, Transport]:
    """By workers per node. Plans alike in this use the same: a job has one plan, and those of the others would be idle
    threads that wake in its turns."""
    packings = dict.fromkeys(plan.workers_per_node for plan in plans.values())
    as_there: dict[str, Any] = {"timeouts": beside.watchdog.timeouts, "process_group": beside.open_groups.parent}
    return {count: Transport(count, turn_bytes=turn_bytes_on(topology), **as_there) for count in packings}


def _running(
    plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss, batches: Sequence[Any], transport: Transport
) -> tuple[Run, Steps]:
    """A copy under that plan, warm, and its steps."""
    mine, stepper = copy.deepcopy((model, optimizer))
    run = attach_over(transport, plan, TrainJob(mine, stepper, check_data=False), owns_transport=False)
    steps = _steps(run, mine, stepper, loss, batches)
    learned = steps_to_learn(plan)
    for _ in range(learned + WARM_STEPS):
        next(steps)
    return run, steps


def _steps(run: Run, model: nn.Module, optimizer: Optimizer, loss: Loss, batches: Sequence[Any]) -> Steps:
    """Without end; the batch is got in its step."""
    endless = itertools.cycle(batches)
    for batch in run.batches(endless) if run.plan.looks_ahead else endless:
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        optimizer.step()
        yield


def _turn(steps: Steps, transport: Transport) -> float:
    """Seconds a step, of the slowest rank."""
    next(steps)  # its connections and caches are cold
    transport.barrier()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        next(steps)
    transport.barrier()
    return transport.agree_largest([(time.perf_counter() - began) / TIMED_STEPS])[0]
