"""What a step of a plan comes to on the machines of a case: seconds of stages, and what each group does, in pieces.

Pricing adds up what a group costs; the simulator has to know what of it comes before forward and what after backward,
what is on which link and what on the processor. The pieces add up to the forecast. Exchanges are not run: their
requests and bytes are those of pricing.

In a loop of the user's own nothing is cut: the model is one stage, every rank goes through a list of its own, and steps
do not overlap. Else stages are those of the plan, and of replicas side by side the first is played.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from armillary.exchanges.averaged_gradients import crossings, packed_share
from armillary.exchanges.dense import DenseExchange, Leg
from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.exchanges.look_up import announcement_bytes, round_leg
from armillary.planning.clock import OUTSIDE, Piece, Request, backward_pieces
from armillary.planning.link_costs import busy
from armillary.planning.pricing import (
    Case,
    coding_seconds,
    dense_update_seconds,
    idle_leg,
    index_seconds,
    landing_seconds,
    pack_seconds,
    predict_seconds_of,
    row_update_seconds,
    row_work,
)
from armillary.planning.stage_costs import copies_of, crossing, owners_of, reduced_bytes
from armillary.plans.group import Group
from armillary.plans.parcel import Layout, layout_of
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact, StageFact
from armillary.plans.topology import Topology
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import RECOMPUTE
from armillary.schedules.schedule import Schedule

__all__ = [
    "ALL_REDUCE",
    "Activities",
    "Costs",
    "StageCosts",
    "Step",
    "activities",
    "costs_of",
    "idle_request",
    "least_seconds",
    "payer",
]

ALL_REDUCE = "all-reduce"  # of a group over replicas; other flights are messages
NOTHING = Request(0.0, 0.0, 0.0)
MODEL = "model"  # what runs outside of every stage


class Activities(NamedTuple):
    """In order of time: requests and processor seconds, before the stage that reads the group and after its gradients.

    headers: of its look-ups, which every rank sends to every other whoever asks. push: made one by one.
    meet: of weights, after the optimizer's step, or before it where `meets_before`; nothing hides them.
    ahead: of a table that prefetches, what leaves in this step for one to come: ids; where rows go early, masks and
        these rows; and where gradients wait, those of the step before. `pull` and `push` then are of the other rows,
        and predict_seconds what it takes to know all this.
    Index work is taken to be half before (rows gathered and dealt) and half after (gradients merged and added), if
    anything is pulled; else it is all after.
    """

    headers: tuple[Request, ...]
    pull: tuple[Request, ...]
    gather_seconds: float
    pack_seconds: float
    push: tuple[Request, ...]
    merge_seconds: float
    update_seconds: float
    ahead: tuple[Request, ...] = ()
    predict_seconds: float = 0.0
    meet: tuple[Request, ...] = ()
    meets_before: bool = False


def activities(group: Group, case: Case, prefetched: int = 0, pays: bool = True) -> Activities:
    """Of the busiest rank.

    Args:
        prefetched: how many tables of the plan prefetch. pays: whether this is their `payer`.
    """
    topology, choice = case.topology, group.own_exchange
    facts = [case.profile.parameter(name) for name in group.parameters]
    if choice.name in row_exchanges():
        work = row_work(facts[0], choice, group.is_lazy, case, group.prefetch, pays)
        rounds = [round_leg(leg.messages, topology, announcement_bytes(prefetched)) for leg in work.headers]
        headers = _requests(rounds, rounds, topology)
        pull = _requests(work.legs.pull, work.even_legs.pull, topology)
        push = _requests(work.legs.push, work.even_legs.push, topology)
        index = index_seconds(work, case)
        before = index / 2 if pull else 0.0
        ahead, predict = _requests(work.ahead, work.even_ahead, topology), predict_seconds_of(work, case)
        after = index - before, row_update_seconds(work, case)
        return Activities(headers, pull, before, 0.0, push, *after, ahead, predict)
    exchange = build_dense(choice.name, **choice.options)
    layout = layout_of(facts, exchange.align, exchange.is_guarded)
    own, *others = (_crossing(one, layout, topology) for one in crossings(exchange))
    push = tuple(request for one in others for request in one)
    packing = pack_seconds(layout.joined_bytes * packed_share(exchange), facts, case)
    coding = exchange.share_due * coding_seconds(choice, layout, case)
    update = dense_update_seconds(layout.joined_bytes, facts, case)
    if exchange.carries == "gradient":
        return Activities((), (), 0.0, packing, own, coding, update)
    return Activities(
        (), (), 0.0, packing, push, coding, update, meet=own, meets_before=exchange.meeting == "before"
    )  # fmt: skip


def _over_replicas(group: Group, options: ScheduleOptions, case: Case) -> Activities:
    """Of a group that is averaged over the ranks that hold its stage, by one request."""
    facts = [case.profile.parameter(name) for name in group.parameters]
    crossed = crossing(facts, group.own_exchange, options, case)
    seconds, is_inside = crossed.link_seconds, case.topology.nodes == 1
    push = Request(crossed.sent_bytes, seconds * is_inside, seconds * (not is_inside))
    return Activities((), (), 0.0, crossed.processor_seconds, (push,), 0.0, 0.0)


def _crossing(exchange: DenseExchange, layout: Layout, topology: Topology) -> tuple[Request, ...]:
    """In the mean over steps."""
    legs, sent = exchange.legs(layout, topology), exchange.sent_bytes(layout, topology)
    hottest = sum(leg.link_bytes for leg in legs)
    share = sum(sent) / len(sent) / hottest if hottest else 0.0  # legs are of the busiest link, bytes are the mean
    even = [leg._replace(link_bytes=leg.link_bytes * share) for leg in legs]
    return tuple(_scaled(request, exchange.share_due) for request in _requests(legs, even, topology))


def _scaled(request: Request, share: float) -> Request:
    """In the mean over steps, of which a share makes it."""
    return Request(*(share * value for value in request))


def idle_request(topology: Topology, tables: int, prefetched: int) -> Request:
    """What ends the look-ups of a step with so many row-sharded tables, of which that many prefetch."""
    header = idle_leg(topology, tables, prefetched)
    return _request(header, header, topology)


def payer(groups: Sequence[Group]) -> str:
    """The group that is charged the messages that all prefetched tables share: one that sends most of them."""
    kinds = {group.prefetch: group.name for group in reversed(groups)}
    return kinds.get("gradients") or kinds.get("rows") or kinds.get("ids", "")


def _requests(legs: Sequence[Leg], even: Sequence[Leg], topology: Topology) -> tuple[Request, ...]:
    return tuple(_request(leg, mean, topology) for leg, mean in zip(legs, even, strict=True))


def _request(leg: Leg, even: Leg, topology: Topology) -> Request:
    carried = busy(leg, topology, latency_share=0.0).seconds
    return Request(even.link_bytes, *busy(leg, topology), carried, topology.beside_seconds(leg.request))


def least_seconds(plan: Plan, case: Case) -> float:
    """No step of a plan for a loop of the user's own is shorter: what its processor does and waits for at once; or the
    first gradients and all that links carry after them. Where something is sent ahead, what its processor does."""
    ahead, paying = sum(group.prefetch != "none" for group in plan.groups), payer(plan.groups)
    does = [activities(group, case, ahead, group.name == paying) for group in plan.groups]
    stages, shown = case.profile.stages, 1 - case.topology.hidden_share
    forward = sum(stage.forward_seconds for stage in stages) + sum(one.gather_seconds for one in does)
    backward = sum(stage.backward_seconds for stage in stages)
    after = sum(one.update_seconds for one in does)
    works = sum(one.pack_seconds + one.merge_seconds for one in does)
    pushed = [request for one in does for request in one.push]
    sends = sum(one.beside_seconds + shown * one.carried_seconds for one in pushed)
    if ahead or not does:
        return forward + backward + works + sends + after
    tables = [one for one in does if one.pull]
    forward += sum(one.beside_seconds + one.seconds for table in tables for one in (*table.headers, *table.pull))
    idle = idle_request(case.topology, len(tables), 0) if tables else NOTHING
    met = [request for one in does for request in one.meet]
    after += sum(one.beside_seconds for one in met) + _on_links(met)
    first = _until_first(plan, case) + idle.beside_seconds + idle.seconds + does[0].pack_seconds
    processor = backward + idle.beside_seconds + idle.seconds + works + sends
    return forward + max(processor, first + _on_links(pushed)) + after


def _on_links(asked: Sequence[Request]) -> float:
    """Of the busier link."""
    return max(sum(one.inside_seconds for one in asked), sum(one.between_seconds for one in asked))


def _until_first(plan: Plan, case: Case) -> float:
    """Of backward, until the first group has its gradients; all of it, where that has one without."""
    missing, passed = set(plan.groups[0].parameters), 0.0
    for piece in backward_pieces(case.profile):
        passed += piece.seconds
        missing.discard(piece.parameter or "")
        if not missing:
            break
    return passed


@dataclass(frozen=True)
class Step:
    """played: what a step hangs on of a plan, so that plans which differ in words alone are played once."""

    played: tuple[object, ...]
    case: Case
    overlap: bool
    pushed: tuple[tuple[str, float], ...]
    plan: Plan = field(compare=False)

    def __hash__(self) -> int:
        return hash((repr(self.played), self.overlap, self.pushed))


@dataclass(frozen=True)
class _Part:
    """Of a forward. tables: that are pulled before it."""

    what: str
    seconds: float
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one micro-batch without coding, and of the optimizer's step, by what it passes over; the last of its
    modules, which says what it passes on; bytes of its weights, and of the counts behind gradients that are summed on
    their way. Pieces: of the backward, whose seconds they add up to. landing: its gradients taken and added, or laid
    into a message.
    """

    forward: tuple[_Part, ...]
    backward: tuple[Piece, ...]
    updates: Mapping[str, float]
    passed: StageFact
    weight_bytes: int = 0
    count_bytes: int = 0
    landing: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What instructions of a plan come to. does: by group that is exchanged. action: by which its gradients go.

    Args of note:
        ties, shared_bytes: of parameters that stages share, by stage that has copies.
        ranks: of replicas that do the same side by side those of the first.
        warm: steps before those that are timed. shown: steps timed.
    """

    stages: Sequence[StageCosts]
    does: Mapping[str, Activities]
    action: str
    schedule: Schedule
    ranks: range
    is_reduced: bool
    ties: Mapping[int, int] = field(default_factory=dict)
    shared_bytes: Mapping[int, float] = field(default_factory=dict)
    warm: int = 4
    shown: int = 2


def costs_of(asked: Step, options: ScheduleOptions) -> Costs:
    """
    Raises:
        ValueError: stages lie on another number of workers than the machines have.
    """
    return (_of_owned_loop if options.method.owns_loop else _of_users_loop)(asked, options)


def _of_users_loop(asked: Step, options: ScheduleOptions) -> Costs:
    """Nothing is cut, and steps do not overlap: one is played."""
    plan, case = asked.plan, asked.case
    ahead, paying = sum(group.prefetch != "none" for group in plan.groups), payer(plan.groups)
    does = {group.name: activities(group, case, ahead, group.name == paying) for group in plan.groups}
    for name, times in asked.pushed:
        push, meet = (tuple(one.with_bytes(times) for one in some) for some in (does[name].push, does[name].meet))
        does[name] = does[name]._replace(push=push, meet=meet)
    units = [unit for unit in case.profile.stages if unit.name != OUTSIDE]
    units += [unit for unit in case.profile.stages if unit.name == OUTSIDE]
    pulled = [group for group in plan.groups if does[group.name].pull]
    read = {group.name: case.profile.parameter(group.parameters[0]).stage for group in pulled}
    forward = tuple(
        _Part(
            unit.name or MODEL, unit.forward_seconds, tuple(name for name, stage in read.items() if stage == unit.name)
        )
        for unit in units
    )
    backward = tuple(piece._replace(stage=piece.stage or MODEL) for piece in backward_pieces(case.profile))
    stage = StageCosts(forward, backward, {name: one.update_seconds for name, one in does.items()}, units[-1])
    one_of_them = replace(options, micro_batches=1).schedule()
    return Costs([stage], does, "push", one_of_them, range(1), True, warm=0, shown=1)


def _of_owned_loop(asked: Step, options: ScheduleOptions) -> Costs:
    plan, case = asked.plan, asked.case
    if case.topology.workers != plan.workers:
        raise ValueError(
            f"simulate: the plan puts stages on {plan.workers} workers, the machines have {case.topology.workers}; "
            f"plan again for these"
        )
    begins, replicas = [stage.begins for stage in plan.stages], options.replicas(plan.workers)
    averaged = plan.groups if replicas > 1 else ()
    return Costs(
        list(_stages(plan, case)),
        {group.name: _over_replicas(group, options, case) for group in averaged},
        ALL_REDUCE,
        options.schedule(),
        range(plan.workers // replicas),
        replicas > 1,
        owners_of(case.profile, begins),
        {stage: reduced_bytes(facts) for stage, facts in copies_of(case.profile, begins).items()},
    )


def _stages(plan: Plan, case: Case) -> Iterator[StageCosts]:
    units = [stage for stage in case.profile.stages if stage.name or not plan.stages]  # left whole: all there is
    starts = [next(place for place, unit in enumerate(units) if unit.name == one.begins) for one in plan.stages] or [0]
    recomputed = [number for number, one in enumerate(plan.stages) if one.residency.name == RECOMPUTE]
    for number, (first, end) in enumerate(pairwise([*starts, len(units)])):
        part, facts = units[first:end], _facts(plan, case, number)
        forward = sum(unit.forward_seconds for unit in part)
        again = forward if number in recomputed else 0.0
        landing = landing_seconds(facts, case)
        pieces = (Piece("", again, None), *_backward_of(part, case), Piece("", landing, None))
        what = f"stage {number}"
        backward = tuple(piece._replace(stage=what) for piece in pieces)
        weights, counts = sum(fact.bytes for fact in facts), sum(fact.bytes // max(1, fact.elements) for fact in facts)
        update = dense_update_seconds(weights, facts, case)
        yield StageCosts((_Part(what, forward),), backward, {what: update}, part[-1], weights, counts, landing)


def _backward_of(part: Sequence[StageFact], case: Case) -> Iterator[Piece]:
    names = {unit.name for unit in part}
    return (piece for piece in backward_pieces(case.profile) if piece.stage in names)


def _facts(plan: Plan, case: Case, stage: int) -> list[ParameterFact]:
    return [case.profile.parameter(name) for group in plan.groups if group.stage == stage for name in group.parameters]
