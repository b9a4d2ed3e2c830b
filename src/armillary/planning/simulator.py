"""Plays one step of a plan against a clock: what the processor does, what is on the links meanwhile, what is exposed.

All ranks do the same in a simultaneous schedule, so one rank stands for any number of them: the one whose link is
busiest. Tables are pulled before the stage that reads them; gradients are packed and pushed, in the plan's order, as
backward makes them, and take the processor for what compute cannot hide of them; what an exchange brought is merged and
the optimizer steps when backward is over, as `runtime/executor` does. Of a push only the first request leaves
with its gradients: each of the others waits for the next launch, or for the end of backward. Tables that prefetch do
so as `tables/lookups` does, in the midst of a loop: every step carries a part of the batch at hand, of the
next and of the one after. Exchanges are not run: their requests and bytes are those of pricing (design 2.2).

A plan whose schedule is lowered to lists of instructions goes to `staged_clock.py`, which plays all ranks.

Departures: one request at a time on a link; what is asked for two steps early is in flight to the end of one.

What one group does in a step, piece by piece: the seconds of its forecast, taken apart in the order of their time.

Pricing adds up what a group costs; the simulator has to know what of it comes before forward and what after backward,
what is on which link and what on the processor. The pieces add up to the forecast.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from armillary.exchanges.averaged_gradients import crossings, packed_share
from armillary.exchanges.dense import DenseExchange, Leg
from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.exchanges.look_up import announcement_bytes, round_leg
from armillary.planning.clock import OUTSIDE, Clock, Request, Simulation, Transfer, backward_pieces
from armillary.planning.link_costs import busy
from armillary.planning.owner_clock import play_owned
from armillary.planning.pricing import (
    Case,
    coding_seconds,
    dense_update_seconds,
    idle_leg,
    index_seconds,
    pack_seconds,
    predict_seconds_of,
    row_update_seconds,
    row_work,
)
from armillary.planning.staged_clock import play
from armillary.plans.group import Forecast, Group
from armillary.plans.layout import Layout, layout_of
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.schedules.registry import SCHEDULES, owns_loop

__all__ = ["LOOK_UPS", "Activities", "activities", "idle_request", "least_seconds", "payer", "simulate"]


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


UNKNOWN = Forecast()
LOOK_UPS = "look-ups"  # headers and the round that ends them go by this name in a measured trace too


def simulate(
    plan: Plan, case: Case, overlap: bool = True, pushed: Mapping[str, float] = MappingProxyType({})
) -> Simulation:
    """One step of the plan on the machines of the case, which need not be those it was made for.

    Args:
        overlap: False makes the processor wait for every request: what the plan's forecast adds up to.
        pushed: by group, how many times the bytes that are forecast its gradients take, where somebody counted them.
            Not under a schedule that owns the loop.

    Raises:
        ValueError: the plan is for another model, or its schedule is not lowered to lists of instructions.
    """
    _refuse_other(plan, case.profile)
    return _simulated(_Step(_played_of(plan), case, overlap, tuple(sorted(pushed.items())), plan))


@dataclass(frozen=True)
class _Step:
    """played: what a step hangs on of a plan, so that plans which differ in words alone are played once."""

    played: tuple[object, ...]
    case: Case
    overlap: bool
    pushed: tuple[tuple[str, float], ...]
    plan: Plan = field(compare=False)

    def __hash__(self) -> int:
        return hash((repr(self.played), self.overlap, self.pushed))


def _played_of(plan: Plan) -> tuple[object, ...]:
    groups = tuple(replace(group, forecast=UNKNOWN, reason="") for group in plan.groups)
    return groups, plan.schedule, plan.stages, plan.mesh


@lru_cache(maxsize=64)
def _simulated(asked: _Step) -> Simulation:
    plan, case = asked.plan, asked.case
    if SCHEDULES[plan.schedule.name].placement.deals_rows:
        return play_owned(plan, case)
    if owns_loop(plan.schedule):
        return play(plan, case)
    player = _Player(plan, case, asked.overlap)
    for name, times in asked.pushed:
        does = player.does[name]
        push, meet = (tuple(request.with_bytes(times) for request in one) for one in (does.push, does.meet))
        player.does[name] = does._replace(push=push, meet=meet)
    player.turn()
    player.forward()
    player.backward()
    player.step()
    flights = tuple(flight for _, flight in sorted(player.flights.items()))
    return Simulation(case.topology.workers, tuple(player.clock.spans), flights, player.clock.now_seconds)


def least_seconds(plan: Plan, case: Case) -> float:
    """No step of a plan for a loop of the user's own is shorter: what its processor does, or its busier link."""
    does = [activities(group, case) for group in plan.groups]
    stages = sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages)
    works = sum(one.gather_seconds + one.pack_seconds + one.merge_seconds + one.update_seconds for one in does)
    asked = [request for one in does for requests in (one.pull, one.push, one.meet) for request in requests]
    links = (sum(one.inside_seconds for one in asked), sum(one.between_seconds for one in asked))
    return max(stages + works, *links)


def _refuse_other(plan: Plan, profile: Profile) -> None:
    if plan.model_fingerprint != profile.model_fingerprint:
        raise ValueError(
            f"simulate: the plan was made for model {plan.model_fingerprint}, the profile is of "
            f"{profile.model_fingerprint}; give the profile.json that stands beside the plan, or plan again"
        )


class _Sent(NamedTuple):
    """Requests under way, and when the last of them is over. number: among all that were launched."""

    number: int
    name: str
    action: str
    requests: tuple[Request, ...]
    began_seconds: float
    done_seconds: float


_Asked = tuple[str, str, tuple[Request, ...]]  # name, action, requests


@dataclass(eq=False)
class _Push:
    """One exchange of gradients under way. left: requests it has still to make after the one in flight, if any is."""

    name: str
    left: deque[Request]
    flying: _Sent | None = None


class _Player:
    """A step under way. late, ahead: by table, what it still has to bring for this step, and for the steps to come, in
    order of launch. pushes: likewise. flights: what has landed, by number of its launch."""

    def __init__(self, plan: Plan, case: Case, overlap: bool) -> None:
        self.plan, self.case, self.overlap = plan, case, overlap
        self.clock = Clock()
        self.launches = count()
        self.flights: dict[int, Transfer] = {}
        ahead, paying = sum(group.prefetch != "none" for group in plan.groups), payer(plan.groups)
        self.does = {group.name: activities(group, case, ahead, group.name == paying) for group in plan.groups}
        self.tables = sum(bool(does.pull) for does in self.does.values())
        self.prefetched = {name: does for name, does in reversed(self.does.items()) if does.ahead}  # as a forward reads
        self.late: dict[str, _Sent] = {}
        self.ahead: dict[str, list[_Sent]] = {name: [] for name in self.prefetched}
        self.pushes: list[_Push] = []

    def turn(self) -> None:
        """The loop gets its batch: ranks meet and say what they expect; then leave what is missing of this batch with
        the ids of the one after next, gradients of the last that could wait, and the rows of the next that stay put.
        While these are on their way, each works out what it will say next."""
        if not self.prefetched:
            return
        self._meet()
        first, *others = self.prefetched.items()
        ids = [(name, "prefetch", does.ahead[:1]) for name, does in self.prefetched.items()]
        for sent in self._together([(first[0], "pull", first[1].pull), *ids], self._start):
            if sent.action == "pull":
                self.late[sent.name] = sent
            else:
                self.ahead[sent.name].append(sent)
        for name, does in others:
            self.late[name] = self._start(name, "pull", does.pull)
        for place in (3, 2):
            items = [(name, does.ahead[place : place + 1]) for name, does in self.prefetched.items()]
            asked = [(name, "prefetch", requests) for name, requests in items if requests]
            for sent in self._together(asked, self._start):
                self.ahead[sent.name].append(sent)
        for name, does in self.prefetched.items():
            self.clock.work(name, "predict", does.predict_seconds)

    def forward(self) -> None:
        stages = {stage.name: stage for stage in self.case.profile.stages}
        order = [name for name in stages if name != OUTSIDE] + [name for name in stages if name == OUTSIDE]
        pulled = [(group, self.case.profile.parameter(group.parameters[0]).stage) for group in self.plan.groups]
        for name in order:
            for group, stage in pulled:
                if stage == name and self.does[group.name].pull:
                    self._pull(group.name)
            self.clock.work(name or "model", "forward", stages[name].forward_seconds)

    def _pull(self, name: str) -> None:
        does = self.does[name]
        if name in self.late:
            self._take(self.late.pop(name))
        else:
            self._take(self._send(LOOK_UPS, "pull", does.headers))
            self._take(self._send(name, "pull", does.pull))
        self.clock.work(name, "gather rows", does.gather_seconds)

    def backward(self) -> None:
        missing = [set(group.parameters) for group in self.plan.groups]
        for piece in backward_pieces(self.case.profile):
            self.clock.work(piece.stage or "model", "backward", piece.seconds)
            for names in missing:
                names.discard(piece.parameter or "")
            while len(self.pushes) < len(missing) and not missing[len(self.pushes)]:
                self._launch(self.plan.groups[len(self.pushes)])
        for group in self.plan.groups[len(self.pushes) :]:
            self._launch(group)

    def step(self) -> None:
        """The last requests; every exchange lands, in order of launch; then the optimizer passes over all groups.
        Weights meet before it or after it, while nothing else is done."""
        while any(push.left for push in self.pushes):
            self._advance()
        for push in self.pushes:
            self._go_on(push)
            self.clock.work(push.name, "merge rows", self.does[push.name].merge_seconds)
        self._exchange_weights(before=True)
        for group in self.plan.groups:
            self.clock.work(group.name, "update", self.does[group.name].update_seconds)
        self._exchange_weights(before=False)
        for under_way in self.ahead.values():
            for sent in under_way:
                self._take(sent)

    def _exchange_weights(self, before: bool) -> None:
        meeting = [(name, one.meet) for name, one in self.does.items() if one.meet and one.meets_before == before]
        for sent in self._together([(name, "meet", requests) for name, requests in meeting], self._send):
            self._take(sent)

    def _meet_in_backward(self) -> None:
        masks = [(name, "prefetch", does.ahead[1:2]) for name, does in self.prefetched.items() if does.ahead[1:]]
        for name, _, _ in masks:  # the owners have the ids, and say which of these rows stay put
            self._take(self.ahead[name].pop(0))
        self._meet(masks)

    def _meet(self, along: Sequence[_Asked] = ()) -> None:
        """The round in which every rank says that it makes no look-up now, and what travels with it."""
        idle = idle_request(self.case.topology, self.tables, len(self.prefetched))
        meeting, *others = self._together([(LOOK_UPS, "pull", (idle,)), *along], self._send)
        self._take(meeting)
        for sent in others:
            self.ahead[sent.name].append(sent)

    def _launch(self, group: Group) -> None:
        if not self.pushes and self.tables:  # before anything is pushed, every rank must have made its look-ups
            self._meet_in_backward()
        does = self.does[group.name]
        self.clock.work(group.name, "pack", does.pack_seconds)
        push = _Push(group.name, deque(does.push))
        self._go_on(push)
        self._advance()
        self.pushes.append(push)

    def _advance(self) -> None:
        """Every push that has requests left makes one more, after the answer to the one before."""
        for push in self.pushes:
            if push.left:
                self._go_on(push)

    def _go_on(self, push: _Push) -> None:
        if push.flying is not None:
            self._take(push.flying)
        push.flying = self._start(push.name, "push", (push.left.popleft(),)) if push.left else None

    def _start(self, name: str, action: str, requests: tuple[Request, ...]) -> _Sent:
        """Sends beside compute: what compute cannot hide of its bytes takes the processor."""
        sent = self._send(name, action, requests)
        if not self.overlap:
            self.clock.wait(name, sent.done_seconds)
        else:
            shown = 1 - self.case.topology.hidden_share
            self.clock.work(name, "carry", shown * sum(request.carried_seconds for request in requests))
        return sent

    def _together(self, asked: Sequence[_Asked], send: Callable[[str, str, tuple[Request, ...]], _Sent]) -> list[_Sent]:
        """What travels as one arrives as one; where nothing overlaps, it is waited for in turn."""
        sent = []
        for one in asked:
            sent.append(send(*one))
            if not self.overlap:
                self.clock.wait(sent[-1].name, sent[-1].done_seconds)
        return [one._replace(done_seconds=sent[-1].done_seconds) for one in sent]

    def _send(self, name: str, action: str, requests: tuple[Request, ...]) -> _Sent:
        """To call a request takes the processor, however small it is, and whether or not the rank then waits for it."""
        self.clock.work(name, "call", sum(request.beside_seconds for request in requests))
        began = self.clock.now_seconds
        return _Sent(next(self.launches), name, action, requests, began, self.clock.send(name, action, requests))

    def _take(self, sent: _Sent) -> None:
        """Waits for it; what asked nothing of the links is no flight."""
        self.clock.wait(sent.name, sent.done_seconds)
        if sent.requests:
            sent_bytes = sum(request.sent_bytes for request in sent.requests)
            flight = Transfer(sent.name, sent.action, sent.began_seconds, self.clock.now_seconds, sent_bytes)
            self.flights[sent.number] = flight
