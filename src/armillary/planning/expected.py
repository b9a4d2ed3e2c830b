"""What a step of a plan is expected to take against a clock, and what plain all-reduce would take for the same data.

A plan's own forecast hides nothing, which is how its groups are priced. A reader asks two other things: how long a step
will last, and what the plan brings over the way that needs no plan.
"""

from dataclasses import replace

from armillary.facts.plan import SIMULTANEOUS, Plan
from armillary.planning.assembly import groups
from armillary.planning.bucket_sizes import sizes
from armillary.planning.candidates import Question, candidate
from armillary.planning.parallax import PLAIN
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.schedules.registry import options_of, owns_loop

__all__ = ["all_reduce_seconds", "with_expected"]


def with_expected(plan: Plan, case: Case) -> Plan:
    """The same plan with both; a step that no clock plays yet stays without.

    Args:
        case: what it was planned for. Under a schedule that owns the loop a batch of its profile is a micro-batch.
    """
    if not owns_loop(plan.schedule):
        played = simulate(plan, case).step_seconds
        return replace(plan, step_seconds=played, all_reduce_seconds=all_reduce_seconds(plan, case))
    batches = options_of(plan).total(plan.workers) / plan.workers
    try:
        played = simulate(plan, case).step_seconds
    except ValueError:  # not lowered to instructions, or with tables by row
        return plan
    return replace(plan, step_seconds=played, all_reduce_seconds=batches * all_reduce_seconds(plan, case))


def all_reduce_seconds(plan: Plan, case: Case) -> float:
    """A step that takes one batch a worker and sends every gradient whole, in buckets of the best size; whether it fits
    in memory or not."""
    found = []
    for limits in sizes(case.topology.backend):
        question = Question(case, {}, frozenset(), limits)
        ways = {fact.name: candidate(fact, PLAIN["replicated"], question) for fact in question.trained}
        buckets = groups(ways, dict.fromkeys(ways, ""), question)
        found.append(replace(plan, groups=buckets, schedule=SIMULTANEOUS, stages=(), consensus="same"))
    return min(simulate(one, case).step_seconds for one in found)
