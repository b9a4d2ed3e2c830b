"""Whole plans that the chosen one is held against: each way a table may cross the workers, for all tables that have it,
with prefetch and without; and in buckets of several sizes.

The planner prices tables one by one and hides nothing behind compute. Which of a few whole plans is the fastest the
simulator says, and better still a few steps of each (`session/autotune.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

from armillary.planning.grouping import counted, is_ownerless
from armillary.planning.planner import bucketings, explain
from armillary.planning.prefetch import prefetching
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.choice import Choice
from armillary.plans.plan import Plan

__all__ = ["AHEAD", "CHOSEN", "alternatives", "at_once", "best", "by_simulation", "with_prefetch"]

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
