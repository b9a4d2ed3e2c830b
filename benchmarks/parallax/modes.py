"""The plans that are compared, by the names of the paper's ablation, for any workload."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from armillary import Choice, Plan, plan
from armillary.facts.plan import Forecast
from armillary.planning.planner import plan_by_rule
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.request import PlanRequest
from armillary.session.events import Decided

__all__ = ["double", "plans"]


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
        found["hybrid"] = plan_by_rule(Case(profile, topology, assumptions), PlanRequest())
    return {**found, "planned": decided.plan, "planned_again": decided.plan}


def double(known: Mapping[str, Plan], mode: str, rivals: Sequence[str]) -> str:
    """The rival whose plan has every rank do exactly what that of `mode` has it do; "" if none has.

    What plans were expected to cost, and what they say to the reader, is left out of it.
    """
    return next((rival for rival in rivals if rival in known and _bare(known[rival]) == _bare(known[mode])), "")


def _bare(plan: Plan) -> Plan:
    groups = tuple(replace(group, forecast=Forecast(), reason="") for group in plan.groups)
    return replace(plan, groups=groups, compute_seconds=0.0, notes=(), priced_with={})
