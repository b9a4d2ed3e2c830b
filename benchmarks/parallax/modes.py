"""The plans that are compared, by the names of the paper's ablation, for any workload."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from armillary import Choice, Plan, Profile, Topology, assumptions_of, plan

__all__ = ["double", "plans"]


def plans(profile: Profile, topology: Topology, planned: Plan, optimizer: Optimizer) -> Mapping[str, Plan]:
    """By name.

    all_reduce: everything whole on every worker. owned_dense: everything whole on one owner each, as a naive parameter
    server; owned_dense_local: gradients added up inside a node first. owned: tables split by row, the rest on owners:
    an optimised parameter server. hybrid: Parallax's rule, with the
    number of owners that its search finds. planned: what was decided for this job.
    """
    assumptions = assumptions_of(optimizer)
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
        found["hybrid"] = plan(profile, topology, assumptions=assumptions, rule="parallax")
    return {**found, "planned": planned, "planned_again": planned}


def double(known: Mapping[str, Plan], mode: str, rivals: Sequence[str]) -> str:
    """The rival whose plan has every rank do exactly what that of `mode` has it do; "" if none has.

    What plans were expected to cost, and what they say to the reader, is left out of it.
    """
    return next((rival for rival in rivals if rival in known and _bare(known[rival]) == _bare(known[mode])), "")


def _bare(plan: Plan) -> Plan:
    groups = tuple(replace(group, forecast=type(group.forecast)(), reason="") for group in plan.groups)
    return replace(plan, groups=groups, compute_seconds=0.0, notes=(), priced_with={})
