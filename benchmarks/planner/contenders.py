"""The plans of a cell: what the planner chooses by price, and every candidate it prices, forced on all tables."""

from collections.abc import Mapping

from armillary.facts.plan import Choice, Forecast, Group, Plan
from armillary.planning.planner import plan
from armillary.planning.pricing import Assumptions
from armillary.planning.rivals import CHOSEN, rivals
from armillary.session.events import Decided

__all__ = ["AGAIN", "contenders"]

AGAIN = "chosen again"  # the same plan a second time: what it differs by is noise


def contenders(decided: Decided, assumptions: Assumptions) -> Mapping[str, Plan]:
    """Plans by name, the chosen one first and twice.

    Beside the planner's candidates: everything whole in one bucket; and where there is no table to choose for,
    everything on owners, since there would be nothing else to be wrong about.
    """
    profile, topology = decided.profile, decided.topology
    found = rivals(profile, topology, assumptions=assumptions)
    whole = plan(profile, topology, constraints={"*": Choice("all_reduce")}, assumptions=assumptions)
    found = {CHOSEN: found[CHOSEN], AGAIN: found[CHOSEN], **found}
    found["one bucket"] = _in_one_bucket(whole)
    if len(found) == len((CHOSEN, AGAIN, "one bucket")):
        found["owned_dense"] = plan(profile, topology, constraints={"*": "owned_dense"}, assumptions=assumptions)
    return found


def _in_one_bucket(whole: Plan) -> Plan:
    names = tuple(name for group in whole.groups for name in group.parameters)
    forecast = sum((group.forecast for group in whole.groups), Forecast())
    group = Group("bucket", names, "replicated", Choice("all_reduce"), forecast=forecast)
    return Plan(
        whole.workers, (group,), whole.model_fingerprint, whole.topology_fingerprint, whole.workers_per_node,
        compute_seconds=whole.compute_seconds, priced_with=whole.priced_with,
    )  # fmt: skip
