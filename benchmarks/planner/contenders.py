"""The plans of a cell: what the planner chooses by price, and every candidate it prices, forced on all tables."""

from collections.abc import Mapping

from armillary import Plan, Profile, Topology, plan
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.request import PlanRequest
from armillary.session.autotune import CHOSEN, alternatives

__all__ = ["AGAIN", "contenders"]

AGAIN = "chosen again"  # the same plan a second time: what it differs by is noise


def contenders(profile: Profile, topology: Topology, assumptions: Assumptions) -> Mapping[str, Plan]:
    """Plans by name, the chosen one first and twice, then the planner's candidates. Where there is no table to choose
    for, everything on owners too, since there would be nothing else to be wrong about."""
    found = alternatives(Case(profile, topology, assumptions), PlanRequest())
    found = {CHOSEN: found[CHOSEN], AGAIN: found[CHOSEN], **found}
    if all(fact.rows is None for fact in profile.parameters):
        found["owned_dense"] = plan(profile, topology, constraints={"*": "owned_dense"}, assumptions=assumptions)
    return found
