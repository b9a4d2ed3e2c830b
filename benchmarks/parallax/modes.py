"""The plans that are compared, by the names of the paper's ablation, for any workload."""

from collections.abc import Mapping

from armillary.facts.plan import Choice, Plan
from armillary.planning.planner import plan, plan_by_rule
from armillary.planning.pricing import Assumptions
from armillary.session.events import Decided

__all__ = ["plans"]


def plans(decided: Decided, assumptions: Assumptions) -> Mapping[str, Plan]:
    """By name.

    all_reduce: everything whole on every worker. owned_dense: everything whole on one owner each, as a naive parameter
    server; owned_dense_local: gradients added up inside a node first. owned: tables split by row, the rest on owners:
    an optimised parameter server. hybrid: Parallax's rule. planned: what was decided for this job.
    """
    profile, topology = decided.profile, decided.topology
    tables = {fact.name: Choice("owned_rows") for fact in profile.parameters if fact.shardable and fact.requires_grad}
    rest = {
        fact.name: Choice("owned_dense")
        for fact in profile.parameters
        if fact.requires_grad and fact.name not in tables
    }
    wishes: dict[str, dict[str, str | Choice]] = {
        "all_reduce": {"*": Choice("all_reduce")},
        "owned_dense": {"*": "owned_dense"},
        "owned_dense_local": {"*": Choice("owned_dense", {"local_aggregation": True})},
        "owned": {**tables, **{name: choice.name for name, choice in rest.items()}},
    }
    if topology.workers == 1:
        wishes = {"all_reduce": wishes["all_reduce"]}
    found = {
        name: plan(profile, topology, constraints=demanded, assumptions=assumptions)
        for name, demanded in wishes.items()
    }
    if topology.workers > 1:
        found["hybrid"] = plan_by_rule(profile, topology, assumptions=assumptions)
    return {**found, "planned": decided.plan, "planned_again": decided.plan}
