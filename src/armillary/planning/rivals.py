"""Whole plans that the chosen one is held against: each way a table may cross the workers, for all tables that have it.

The planner prices tables one by one and hides nothing behind compute. Which of a few whole plans is the fastest the
simulator says, and better still a few steps of each (`session/trials.py`).
"""

from collections.abc import Iterable, Mapping

from armillary.facts.plan import Choice, Mean, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.planner import NO_CONSTRAINTS, explain, plan
from armillary.planning.pricing import ADAM, Assumptions, Case
from armillary.planning.simulator import simulate

__all__ = ["CHOSEN", "by_simulation", "rivals"]

CHOSEN = "chosen"


def rivals(
    profile: Profile,
    topology: Topology,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Iterable[str] = (),
    mean: Mean = "workers",
    assumptions: Assumptions = ADAM,
) -> dict[str, Plan]:
    """The plan chosen by price, and one for every candidate of any table, by name; arguments as `plan`'s.

    A table that does not offer a way, or for which the user demands another, keeps what the plan chose. Plans that do
    not fit in memory are left out, and so are those that come to the same as an earlier one.
    """
    lazy = tuple(lazy)
    chosen = plan(profile, topology, constraints=constraints, lazy=lazy, mean=mean, assumptions=assumptions)
    taken: dict[str, Choice] = {}
    offered: dict[str, dict[str, Choice]] = {}
    for verdict in explain(profile, topology, constraints=constraints, lazy=lazy, assumptions=assumptions):
        one = verdict.candidate
        if verdict.is_chosen:
            taken[one.parameter] = one.choice
        if not verdict.lost.startswith("constraint"):
            offered.setdefault(str(one.choice), {})[one.parameter] = one.choice
    found = {CHOSEN: chosen}
    for name, ways in offered.items():
        if {**taken, **ways} == taken:
            continue
        wishes = {**constraints, **taken, **ways}
        try:
            found[name] = plan(profile, topology, constraints=wishes, lazy=lazy, mean=mean, assumptions=assumptions)
        except ValueError:  # does not fit
            continue
    return found


def by_simulation(plans: Mapping[str, Plan], case: Case) -> list[str]:
    """The names of the plans, the shortest simulated step first."""
    return sorted(plans, key=lambda name: simulate(plans[name], case).step_seconds)
