"""Times a few whole plans in this job, on copies of the model, before step 0; the winner is what is carried out.

A forecast that is off by a tenth cannot tell two plans apart that differ by less. A few steps of each can, and cost
less than the choice between them is worth over a training. The copies are dropped, so training begins as it would have.

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
from armillary.plans.plan import Plan
from armillary.plans.topology import Topology, turn_bytes_on
from armillary.plans.units import seconds_text
from armillary.prefetch.kinds import steps_to_learn
from armillary.profiler.probe import Loss
from armillary.session.attach import attach_over
from armillary.session.job import TrainJob
from armillary.session.run import Run
from armillary.transport.transport import Transport

__all__ = ["fastest"]

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
