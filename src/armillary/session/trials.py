"""Times a few whole plans in this job, on copies of the model, before step 0; the winner is what is carried out.

A forecast that is off by a tenth cannot tell two plans apart that differ by less. A few steps of each can, and cost
less than the choice between them is worth over a training. The copies are dropped, so training begins as it would have.

Source: Parallax (Kim et al., EuroSys 2019) searches its partitions by running the job; there each trial is a new
launch, here it is a turn in the job that is to be run.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.facts.profile_table import seconds_text
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss
from armillary.runtime.watch.untouched import untouched
from armillary.session.attach import attach
from armillary.session.run import Run

__all__ = ["fastest"]

WARM_STEPS, TIMED_STEPS, ROUNDS = 2, 3, 4


def fastest(
    plans: Mapping[str, Plan], model: nn.Module, optimizer: Optimizer, loss: Loss, batch: Any, transport: Transport
) -> Plan:
    """The plan whose steps were the shortest, with what was measured in its notes. Every rank must call it; all get the
    same plan. Model, optimizer and random streams stay as they were; memory for a copy of both a plan is needed.

    Args:
        plans: by name, for this model. batch: of this rank.
    """
    with untouched(model):
        running = {name: _running(plan, model, optimizer, loss, batch) for name, plan in plans.items()}
        names, turns = list(plans), {name: list[float]() for name in plans}
        for index in range(ROUNDS):  # another one first each time, so that none always follows the same
            for name in names[index % len(names) :] + names[: index % len(names)]:
                turns[name].append(_turn(running[name][1], transport))
        for run, _ in running.values():
            run.detach()
            run.transport.close()
    seconds = {name: statistics.median(found) for name, found in turns.items()}
    winner = min(names, key=seconds.__getitem__)
    said = ", ".join(f"{name} {seconds_text(seconds[name])}" for name in names)
    steps = ROUNDS * TIMED_STEPS
    note = f"timed in this job over {steps} steps each: {said}; {winner} is carried out"
    return replace(plans[winner], notes=(*plans[winner].notes, note))


def _running(
    plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss, batch: Any
) -> tuple[Run, Callable[[], None]]:
    """A copy under that plan, and its step."""
    mine, stepper = copy.deepcopy((model, optimizer))
    run = attach(plan, mine, stepper)

    def step() -> None:
        stepper.zero_grad(set_to_none=True)
        loss(mine, batch).backward()
        stepper.step()

    for _ in range(WARM_STEPS):
        step()
    return run, step


def _turn(step: Callable[[], None], transport: Transport) -> float:
    """Seconds a step, of the slowest rank."""
    step()  # its connections and caches are cold
    transport.barrier()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    transport.barrier()
    return transport.agree_largest([(time.perf_counter() - began) / TIMED_STEPS])[0]
