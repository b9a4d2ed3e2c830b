"""What a step of a plan is expected to take against a clock, and what plain all-reduce would take for the same data.

A plan's own forecast hides nothing, which is how its groups are priced. A reader asks two other things: how long a step
will last, and what the plan brings over the way that needs no plan.
"""

from dataclasses import replace

from armillary.planning.candidates import Question, candidate, peak_bytes
from armillary.planning.constraints import PLAIN
from armillary.planning.grouping import groups, sizes
from armillary.planning.memory import needed_bytes
from armillary.planning.pricing import Case
from armillary.planning.simulator import quickest, simulate
from armillary.plans.mesh import Mesh
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.units import bytes_text, seconds_text
from armillary.schedules.registry import options_of

__all__ = ["all_reduce_seconds", "with_expected", "with_slower_said"]

SLOWER = 1.02  # times: forecasts do not tell less apart


def with_expected(plan: Plan, case: Case) -> Plan:
    """The same plan with both; a step that no clock plays yet stays without.

    Args:
        case: what it was planned for. Under a schedule that owns the loop a batch of its profile is a micro-batch.
    """
    batches = options_of(plan).total(plan.workers) / plan.workers
    try:
        played = simulate(plan, case).step_seconds
    except ValueError:  # not lowered to instructions
        return plan
    return replace(plan, step_seconds=played, all_reduce_seconds=batches * all_reduce_seconds(plan, case))


def all_reduce_seconds(plan: Plan, case: Case) -> float:
    """A step that takes one batch a worker and sends every gradient whole, in buckets of the best size; whether it fits
    in memory or not."""
    return min(quickest(_all_reducing(plan, case), case).values())


def with_slower_said(plan: Plan, case: Case, is_constrained: bool) -> Plan:
    """The plan with the reason, if its step is expected to take longer than plain all-reduce.

    Args:
        plan: with what is expected. is_constrained: whether something in it is demanded.
    """
    mine, other = seconds_text(plan.step_seconds), seconds_text(plan.all_reduce_seconds)
    if plan.step_seconds <= SLOWER * plan.all_reduce_seconds or mine == other:
        return plan
    note = f"slower than all-reduce of everything ({mine}, not {other}): {_why_slower(plan, case, is_constrained)}"
    return replace(plan, notes=(*plan.notes, note))


def _why_slower(plan: Plan, case: Case, is_constrained: bool) -> str:
    needed = min(needed_bytes(one, case) for one in _all_reducing(plan, case))
    if needed > case.topology.memory_bytes:
        return f"that would not fit in memory, as it needs {bytes_text(needed)}"
    if is_constrained:
        return "constraints (--exchange, --replicate) ask for it"
    less = needed - needed_bytes(plan, case)
    if less > 0:
        return f"it needs {bytes_text(less)} less memory, and alone its exchanges are priced about as low"
    return "prices of exchanges hide nothing behind compute; autotune=4 (train --autotune 4) times both"


def _all_reducing(plan: Plan, case: Case) -> list[Plan]:
    """A plan for the same that sends every gradient whole, in buckets of every size."""
    found = []
    for limits in sizes(case.topology.backend):
        question = Question(case, {}, frozenset(), limits)
        ways = {fact.name: candidate(fact, PLAIN["replicated"], question) for fact in question.trained}
        buckets = groups(ways, dict.fromkeys(ways, ""), question)
        peak, mesh = peak_bytes(buckets, case), Mesh.of(data=plan.workers)
        plain = replace(plan, mesh=mesh, groups=buckets, schedule=SIMULTANEOUS, stages=(), activation_bytes=peak)
        found.append(replace(plain, consensus="same"))
    return found
