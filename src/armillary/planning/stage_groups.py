"""The dense groups of a stage: what travels together over the ranks that hold the stage, and by which exchange.

A group is of one dtype and one exchange. Ranks that hold a stage are numbered by replica and sit on nodes of their own,
as the exchange sees them. Where a stage is on one rank only nothing crosses, and an exchange that is named is kept for
what a checkpoint may bring: all that waits in it arrives with the first push.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.facts.layout import layout_of
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice
from armillary.facts.topology import Topology
from armillary.planning.buckets import arrival_of, buckets, default_limits
from armillary.planning.leg_seconds import leg_seconds
from armillary.planning.parallax import PLAIN
from armillary.planning.pricing import Case, coding_seconds, pack_seconds
from armillary.schedules.method import ScheduleOptions

__all__ = [
    "NO_WAYS", "GroupPart", "PartCost", "Ways", "charged_to", "crossing", "departures_of", "over_replicas",
    "parts_of_stage", "reduced_bytes",
]  # fmt: skip

Ways = Mapping[str, Choice]  # dense exchanges that are asked for, by parameter
NO_WAYS: Ways = MappingProxyType({})


class GroupPart(NamedTuple):
    """Parameters of a stage that travel together; by the schedule's own messages where there is no exchange."""

    facts: tuple[ParameterFact, ...]
    exchange: Choice | None


def parts_of_stage(
    facts: Sequence[ParameterFact], options: ScheduleOptions, topology: Topology, ways: Ways = NO_WAYS
) -> list[GroupPart]:
    """In buckets, in the order in which these become complete, where several ranks hold the stage. Where an exchange
    has an owner and none is named, each parameter goes to the one that has fewest bytes so far.

    Args:
        ways: of all stages: where an exchange is asked for, everything goes by one.
    """
    method, replicas = options.method, options.replicas(topology.workers)
    usual = PLAIN["replicated"] if method.is_side_by_side or replicas > 1 or ways else None
    if not method.has_exchanges:
        return [GroupPart(tuple(facts), usual)] if facts else []
    found: dict[tuple[str, str], GroupPart] = {}
    load = [0] * replicas
    for fact in facts:
        choice = ways.get(fact.name, usual)
        option = dense_exchanges()[choice.name].owner_option if choice is not None else ""
        if choice is not None and option and option not in choice.options:
            owner = min(range(replicas), key=load.__getitem__)
            load[owner] += fact.bytes
            choice = Choice(choice.name, {**choice.options, option: owner})
        key = fact.name if option else str(choice), fact.dtype
        part = found.get(key, GroupPart((), choice))
        found[key] = part._replace(facts=(*part.facts, fact))
    if replicas == 1:
        return list(found.values())
    limits = default_limits(topology.backend)
    cut = [GroupPart(bucket, part.exchange) for part in found.values() for bucket in buckets(part.facts, limits)]
    return sorted(cut, key=lambda part: max(map(arrival_of, part.facts)))


def reduced_bytes(facts: Iterable[ParameterFact]) -> int:
    """Of gradients that are added up over ranks, with a count for every parameter."""
    return sum(fact.bytes + fact.bytes // max(1, fact.elements) for fact in facts)


def charged_to(stage: int, holding: Sequence[int]) -> int:
    """The stage whose group is charged with what a stage passes on: its own. One that owns no parameter has none: then
    the nearest before it, or the first.

    Args:
        holding: the stages that have groups, rising.
    """
    return next((j for j in reversed(holding) if j <= stage), holding[0])


def departures_of(choice: Choice | None) -> tuple[str, ...]:
    """In what the exchange is not exact."""
    return () if choice is None else dense_exchanges()[choice.name].departs


def over_replicas(options: ScheduleOptions, topology: Topology) -> Topology:
    """The ranks that hold a stage, as its exchanges see them: everybody, or a node each."""
    replicas = options.replicas(topology.workers)
    if replicas == topology.workers:
        return topology
    side = topology.slowest_side
    links = tuple(replace(one, side="between") for one in topology.requests if one.side == side)
    return replace(topology, nodes=replicas, workers_per_node=1, between=topology.link, requests=links)


class PartCost(NamedTuple):
    """One push of a part. sent_bytes: of a rank that holds the stage, in the mean. link_seconds: of the busiest link;
    processor_seconds: to pack and to code. kept_bytes: of bucket and state on a rank that holds the stage, besides a
    gradient."""

    sent_bytes: float
    link_seconds: float
    processor_seconds: float
    kept_bytes: float

    @property
    def seconds(self) -> float:
        return self.link_seconds + self.processor_seconds


def crossing(facts: Sequence[ParameterFact], choice: Choice, options: ScheduleOptions, case: Case) -> PartCost:
    """Of these parameters over the ranks that hold them."""
    exchange, topology = build_dense(choice.name, **choice.options), over_replicas(options, case.topology)
    layout = layout_of(facts, exchange.align, exchange.is_guarded)
    sent = exchange.sent_bytes(layout, topology)
    links = leg_seconds(exchange.legs(layout, topology), topology)
    coding = coding_seconds(choice, layout, replace(case, topology=topology))
    processor = pack_seconds(layout.joined_bytes, (), case) + coding
    besides = layout.joined_bytes - sum(fact.bytes for fact in facts)
    kept = besides + exchange.state_bytes(layout, topology.workers)
    return PartCost(sum(sent) / len(sent), links, processor, float(kept))
