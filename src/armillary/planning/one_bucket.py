"""The same plan with its buckets made one: fewer requests, none of which hides behind the backward pass.

Buckets are there to hide. Where links are about as fast as memory, or the backward is short, what each of them costs (a
message to every rank, work on a processor that computes) is more than what it hides.

Source: Li et al., PyTorch Distributed (VLDB 2020): the size of buckets as a trade.
"""

from collections.abc import Sequence
from dataclasses import replace

from armillary.exchanges.exchange import dense_exchanges
from armillary.facts.plan import Choice, Group, Plan
from armillary.planning.buckets import bucket_bytes
from armillary.planning.pricing import Case, dense_forecast

__all__ = ["in_one_bucket", "is_ownerless"]

REASON = "whole, in one bucket"


def in_one_bucket(plan: Plan, case: Case) -> Plan:
    """One bucket for each dtype and exchange without an owner, where the last of those that are in it stood; the plan
    itself if that changes nothing.

    Parameters of which no gradient was seen stay in buckets of their own, since they would hold up any other.
    """
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in plan.groups:
        facts = [case.profile.parameter(name) for name in group.parameters]
        if is_ownerless(group.exchange) and all(fact.arrival is not None for fact in facts):
            kinds.setdefault((str(group.exchange), facts[0].dtype), []).append(group)
    several = [alike for alike in kinds.values() if len(alike) > 1]
    if not several:
        return plan
    merged = {alike[-1].name: _merged(alike, plan, case) for alike in several}
    gone = {group.name for alike in several for group in alike[:-1]}
    groups = tuple(merged.get(group.name, group) for group in plan.groups if group.name not in gone)
    return replace(plan, groups=groups)


def is_ownerless(choice: Choice) -> bool:
    """Whether it moves buckets alike on all ranks."""
    entry = dense_exchanges().get(choice.name)
    return entry is not None and not entry.owner_option


def _merged(alike: Sequence[Group], plan: Plan, case: Case) -> Group:
    names = tuple(name for group in alike for name in group.parameters)
    facts = [case.profile.parameter(name) for name in names]
    forecast = dense_forecast(bucket_bytes(facts, plan.mean == "weights"), alike[-1].exchange, case, facts=facts)
    return replace(alike[-1], parameters=names, forecast=forecast, reason=REASON)
