"""Codecs of the edges between stages: what was asked, and what it does to bytes, seconds and memory.

Bytes are those of the codes, with what goes ahead of a code whose length the data decide; of those the forecast is what
the codec's options say. Coding takes the processor of both stages, and hides behind nothing. A code is held until the
gradient has come back, as the activation is.

The dense groups of a stage: what travels together over the ranks that hold the stage, and by which exchange.

A group is of one dtype and one exchange. Ranks that hold a stage are numbered by replica and sit on nodes of their own,
as the exchange sees them. Where a stage is on one rank only nothing crosses, and an exchange that is named is kept for
what a checkpoint may bring: all that waits in it arrives with the first push.

Parameters that several stages read: the first of them owns one, the others hold copies of it (`schedules/ties.py`).

A profile knows the names of a parameter, and the modules at which a model can be cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from armillary.codecs.registry import CODECS, GUARD_BYTES
from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.planning.candidates import arrival_of, buckets, default_limits
from armillary.planning.constraints import PLAIN
from armillary.planning.link_costs import leg_seconds
from armillary.planning.pricing import Case, coding_seconds, pack_seconds
from armillary.plans.parcel import layout_of
from armillary.plans.profile import Numbers, ParameterFact, Profile, StageFact
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.plans.units import bytes_text
from armillary.schedules.edges import IN_MEMORY_BYTES, SAME, Edge, EdgeCode, codes_of
from armillary.schedules.method import Method, ScheduleOptions, StageLoad
from armillary.schedules.ties import ParameterUse

__all__ = [
    "NO_WAYS",
    "EdgeRequest",
    "EdgeRequests",
    "GroupPart",
    "PartCost",
    "Ways",
    "charged_to",
    "coding_seconds_of",
    "copies_of",
    "crossing",
    "departures_of",
    "loads_with_edges",
    "notes_on_edges",
    "over_replicas",
    "owners_of",
    "parts_of_stage",
    "reduced_bytes",
    "sent_over",
    "stage_numbers",
    "uses_of",
]

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
    usual = PLAIN["replicated"] if method.replicates_table or replicas > 1 or ways else None
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


def stage_numbers(profile: Profile, begins: Sequence[str]) -> dict[str, int]:
    """By module of the profile, the stage that it is in. begins: the first module of every stage."""
    names = [unit.name for unit in profile.stages if unit.name]
    edges = [*map(names.index, begins), len(names)]
    return {name: j for j, (start, end) in enumerate(pairwise(edges)) for name in names[start:end]}


def uses_of(fact: ParameterFact, stages: Mapping[str, int]) -> list[ParameterUse]:
    """One for each stage that holds the parameter under a name of its own, the first stage first."""
    found: dict[int, ParameterUse] = {}
    for name in (fact.name, *fact.aliases):
        if holders := [unit for unit in stages if name.startswith(f"{unit}.")]:
            stage = stages[max(holders, key=len)]
            found.setdefault(stage, ParameterUse(stage, name))
    return [found[stage] for stage in sorted(found)]


def copies_of(profile: Profile, begins: Sequence[str]) -> dict[int, list[ParameterFact]]:
    """What a stage has copies of, by stage that has some."""
    stages, found = stage_numbers(profile, begins), dict[int, list[ParameterFact]]()
    for fact in profile.parameters:
        for use in uses_of(fact, stages)[1:] if fact.requires_grad else ():
            found.setdefault(use.stage, []).append(fact)
    return found


def owners_of(profile: Profile, begins: Sequence[str]) -> dict[int, int]:
    """By stage that has copies, the stage that owns the parameters."""
    stages = stage_numbers(profile, begins)
    return {j: uses_of(facts[0], stages)[0].stage for j, facts in copies_of(profile, begins).items()}


EdgeRequest = Choice | str | Mapping[int, Choice | str] | None  # of all edges, or by the stage below

Passed = StageFact | StageLoad  # which say what they hand on

LENGTH_BYTES = 8  # goes ahead of a code whose length the data decide
FEW_BITS, MANY = 4, 1 << 12  # of a number, in so many of them: a gradient in fewer bits is warned of
WORK_AT_PLACES = 3.0  # numbers read and written per value, to pick out those at places that are known


@dataclass(frozen=True)
class EdgeRequests:
    """
    Raises:
        ValueError: something else than codecs, of all edges or by stage.
    """

    edge: EdgeRequest = None
    edge_back: EdgeRequest = None

    def __post_init__(self) -> None:
        for name, request in (("edge", self.edge), ("edge_back", self.edge_back)):
            asked = request if isinstance(request, Mapping) else {0: request}
            strange = [key for key in asked if isinstance(key, bool) or not isinstance(key, int) or key < 0]
            if strange or any(not isinstance(one, Choice | str | None) for one in asked.values()):
                raise ValueError(
                    f"plan: {name} is {request!r}; want a codec as text or as a Choice, or a mapping from numbers of "
                    "stages to such"
                )

    def __bool__(self) -> bool:
        return bool(self.edge) or bool(self.edge_back)

    def refuse_without_edges(self, schedule: Choice, method: Method) -> None:
        """
        Raises:
            ValueError: something is asked of the edges of a schedule that has none to code.
        """
        if self and method.no_edges:
            raise ValueError(
                f"plan: edge and edge_back code what goes from stage to stage; under {schedule} {method.no_edges}. "
                f"Name a pipeline as the schedule, or drop them (--exchange codes gradients of replicas)"
            )

    def of(self, options: ScheduleOptions) -> ScheduleOptions:
        """The options with every edge as it is asked for.

        Raises:
            ValueError: an edge that there is not, or that cannot be coded so.
        """
        if not self:
            return options
        if options.stages == 1:
            raise ValueError("plan: edge and edge_back are for what goes from stage to stage; there is one stage")
        on, back = _by_stage(self.edge, options.stages), _by_stage(self.edge_back, options.stages)
        last = max(options.stages - 1, *on, *back)
        return replace(options, edges=tuple(Edge(on.get(j), back.get(j)) for j in range(last + 1)))


def _by_stage(request: EdgeRequest, stages: int) -> Mapping[int, Choice]:
    if request is None:
        return {}
    asked = request if isinstance(request, Mapping) else dict.fromkeys(range(stages - 1), request)
    return {stage: CODECS.named(one) for stage, one in asked.items()}


def sent_over(code: EdgeCode | None, below: Passed) -> float:
    """Bytes of a message, an activation or its gradient.

    Args:
        below: the stage below the edge.
    """
    if code is None or code.rests:
        return below.output_bytes
    raw = sum(one.numel * one.item_bytes for one in below.output_numbers)
    return below.output_bytes - raw + sum(_code_bytes(code, one) for one in below.output_numbers)


def _code_bytes(code: EdgeCode, one: Numbers) -> int:
    places = code.codec.places
    if code.follows and places is not None:
        return LENGTH_BYTES + GUARD_BYTES + places(one.numel) * one.item_bytes
    return (0 if code.is_fixed else LENGTH_BYTES) + code.codec.expected_bytes(*one)


def _refuse_unknown(below: StageLoad) -> None:
    if below.output_bytes and not below.output_numbers:
        raise ValueError(
            f"edge: of what stage {below.first} .. {below.last} hands on, the profile knows no floating numbers in two "
            f"dimensions or more that ask for a gradient, which a codec could write; drop its edge, or profile again"
        )


def coding_seconds_of(code: EdgeCode | None, below: Passed, case: Case) -> float:
    """Of one side of one message: encoding or decoding."""
    if code is None or code.rests:
        return 0.0
    work = WORK_AT_PLACES if code.follows else code.codec.work
    raw = sum(one.numel * one.item_bytes for one in below.output_numbers)
    return raw * work / 2 / case.assumptions.memory_bytes_per_second


def loads_with_edges(loads: Sequence[StageLoad], options: ScheduleOptions, case: Case) -> tuple[StageLoad, ...]:
    """Stages with the seconds of their coding, and with the codes that they hold."""
    codes, found = codes_of(options.edges), list(loads)
    for below, above in ((j, j + 1) for j in range(len(loads) - 1)):
        ways = (("activation", below), ("activation gradient", above))
        if codes.keys() & set(ways):
            _refuse_unknown(loads[below])
        for way in ways:
            seconds = coding_seconds_of(codes.get(way), loads[below], case)
            for j in (below, above):
                found[j] = replace(found[j], seconds=found[j].seconds + seconds)
        for j, way in zip((below, above), ways, strict=True):
            held = 0 if way not in codes or codes[way].rests else sent_over(codes[way], loads[below])
            found[j] = replace(found[j], activation_bytes=found[j].activation_bytes + round(held))
        if ways[0] in codes and codes[ways[0]].cache_bytes <= IN_MEMORY_BYTES:
            for j in (below, above):
                held = codes[ways[0]].cache_bytes * len(loads[below].output_numbers)
                found[j] = replace(found[j], cache_bytes=found[j].cache_bytes + held)
        if ways[0] in codes and codes[ways[0]].leads:
            bits = sum(one.numel for one in loads[below].output_numbers)
            for j in (below, above):
                found[j] = replace(found[j], activation_bytes=found[j].activation_bytes + -(-bits // 8))
    return tuple(found)


def notes_on_edges(options: ScheduleOptions) -> list[str]:
    """What is lost, and what it costs where it is known to cost."""
    if not options.edges:
        return []
    notes = ["what a code of an edge leaves out is lost: nothing is sent later, as it is of gradients between replicas"]
    remembered = [(what[1], code.cache_bytes) for what, code in codes_of(options.edges).items() if code.cache_bytes]
    for stage, cache_bytes in remembered:
        notes.append(
            f"the edge of stage {stage} remembers samples: bytes are forecast for samples met before; each is sent "
            f"whole the first time, and again after a restart. Each end holds up to {bytes_text(cache_bytes)} of every "
            f"tensor{'' if cache_bytes <= IN_MEMORY_BYTES else ', in a file'}; the oldest go first. A sample that is "
            f"augmented at random is new every time"
        )
    thinned = [
        stage - 1 for (_, stage), code in codes_of(options.edges).items()
        if options.edges[stage - 1].back not in (None, SAME) and code.codec.places is not None
    ]  # fmt: skip
    few = [
        stage - 1 for (what, stage), code in codes_of(options.edges).items()
        if what != "activation" and not code.follows and code.codec.places is None
        and code.codec.expected_bytes(MANY, 4) * 8 < FEW_BITS * MANY
    ]  # fmt: skip
    if few:
        notes.append(
            f"the gradient that comes back to stage {', '.join(map(str, sorted(few)))} has fewer than {FEW_BITS} bits "
            f"a number, and nothing of the rest is sent later: look at the loss (armillary twin), or take more bits"
        )
    if thinned:
        named = ", ".join(map(str, sorted(set(thinned))))
        notes.append(
            f"the gradient that comes back to stage {named} is thinned for itself, which is biased and has been "
            f"seen to hurt (MLSys 2024): edge_back=same sends it in the places of its activation"
        )
    return notes
