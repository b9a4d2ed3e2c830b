"""What one group does in a step, piece by piece: the seconds of its forecast, taken apart in the order of their time.

Pricing adds up what a group costs; the simulator has to know what of it comes before forward and what after backward,
what is on which link and what on the processor. The pieces add up to the forecast.
"""

from collections.abc import Sequence
from typing import NamedTuple

from armillary.exchanges.announcement import announcement_bytes
from armillary.exchanges.averaged_gradients import crossings, packed_share
from armillary.exchanges.exchange import DenseExchange, build_dense, row_exchanges
from armillary.exchanges.leg import Leg
from armillary.exchanges.look_up import round_leg
from armillary.facts.layout import Layout, layout_of
from armillary.facts.plan import Group
from armillary.facts.topology import Topology
from armillary.planning.clock import Request
from armillary.planning.leg_seconds import busy
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

__all__ = ["Activities", "activities", "idle_request", "payer"]


class Activities(NamedTuple):
    """In order of time: requests and processor seconds, before the stage that reads the group and after its gradients.

    headers: of its look-ups, which every rank sends to every other whoever asks. push: made one by one.
    meet: of weights, after the optimizer's step, or before it where `meets_before`; nothing hides them.
    ahead: of a table that prefetches, what leaves in this step for one to come: ids; where rows go early, masks and
        these rows. `pull` then is of the other rows, and predict_seconds what it takes to know all this.
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
    return kinds.get("rows") or kinds.get("ids", "")


def _requests(legs: Sequence[Leg], even: Sequence[Leg], topology: Topology) -> tuple[Request, ...]:
    return tuple(_request(leg, mean, topology) for leg, mean in zip(legs, even, strict=True))


def _request(leg: Leg, even: Leg, topology: Topology) -> Request:
    carried = busy(leg, topology, latency_share=0.0).seconds
    return Request(even.link_bytes, *busy(leg, topology), carried, topology.beside_seconds(leg.request))
