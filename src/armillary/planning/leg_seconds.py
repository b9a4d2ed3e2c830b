"""Seconds of the legs of an exchange over the links of a topology, at the rank whose link is busiest.

Legs follow one another; nothing is hidden behind compute (that is the simulator's business). Each also takes a rank
what calling it and waking threads takes, as far as that was measured: once, since messages that follow in a row find
them awake.

Source: Thakur, Rabenseifner and Gropp (2005): latency once a message, bandwidth on what passes the link. Departure: an
all-to-all posts all its pieces at once, so it waits for one latency, not for N - 1. Where a topology was measured, each
kind of request has links of its own.

Note [Ring]. A rank's link between nodes is its share of the node's card. Of a ring only the node's last rank sends
beyond the node, and so has the shares of all its ranks.
"""

from collections.abc import Iterable
from typing import NamedTuple

from armillary.exchanges.leg import Leg
from armillary.facts.topology import Topology

__all__ = ["Busy", "busy", "leg_seconds"]


class Busy(NamedTuple):
    """How long one leg keeps each link of the busiest rank, both at once."""

    inside: float
    between: float

    @property
    def seconds(self) -> float:
        return max(self)


def leg_seconds(legs: Iterable[Leg], topology: Topology, latency_share: float = 1.0) -> float:
    """latency_share: of every latency, and of every call, what these legs pay; the rest is paid by others that travel
    with them."""
    return sum(
        busy(leg, topology, latency_share).seconds + latency_share * topology.beside_seconds(leg.request)
        for leg in legs
    )


def busy(leg: Leg, topology: Topology, latency_share: float = 1.0) -> Busy:
    """Nothing where there is no other rank."""
    here, others = topology.workers_per_node, topology.workers - 1
    if others == 0:
        return Busy(0.0, 0.0)
    near = (here - 1) / others  # share of the other ranks that are on this node
    inside_share, between_share = {
        "slowest": (float(topology.nodes == 1), 1.0),
        "everyone": (near, 1 - near),
        "neighbour": (1.0, 1 / here),  # see Note [Ring]
        "node": (1.0, 0.0),
        "rail": (0.0, 1.0),
    }[leg.links]
    messages = leg.messages * latency_share
    inside = between = 0.0
    if here > 1 and inside_share > 0:
        inside = topology.link_of(leg.request, "inside").seconds(leg.link_bytes * inside_share, messages)
    if topology.nodes > 1 and between_share > 0:
        between = topology.link_of(leg.request, "between").seconds(leg.link_bytes * between_share, messages)
    return Busy(inside, between)
