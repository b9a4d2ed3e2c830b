"""Seconds of the legs of an exchange over the links of a topology, at the rank whose link is busiest.

Legs over the same links are taken together; nothing is hidden behind compute (that is the simulator's business).

Source: Thakur, Rabenseifner and Gropp (2005): latency once a message, bandwidth on what passes the link. Departure: an
all-to-all posts all its pieces at once, so it waits for one latency, not for N - 1.
"""

from collections import defaultdict
from collections.abc import Iterable

from armillary.exchanges.leg import Leg, Links
from armillary.facts.topology import Topology

__all__ = ["leg_seconds"]


def leg_seconds(legs: Iterable[Leg], topology: Topology, latency_share: float = 1.0) -> float:
    """latency_share: of every latency, what these legs pay; the rest is paid by others that travel with them."""
    link_bytes: dict[Links, float] = defaultdict(float)
    messages: dict[Links, float] = defaultdict(float)
    for leg in legs:
        link_bytes[leg.links] += leg.link_bytes
        messages[leg.links] += leg.messages * latency_share
    return sum(_seconds(links, link_bytes[links], messages[links], topology) for links in link_bytes)


def _seconds(links: Links, link_bytes: float, messages: float, topology: Topology) -> float:
    """Nothing where there is no other rank."""
    if topology.workers == 1:
        return 0.0
    if links == "slowest":
        return topology.link.seconds(link_bytes, messages)
    here, nodes = topology.workers_per_node, topology.nodes
    inside_bytes = {"node": link_bytes, "rail": 0.0, "everyone": link_bytes * (here - 1) / (topology.workers - 1)}[
        links
    ]
    seconds = [0.0]
    if here > 1 and links != "rail":
        seconds.append(topology.inside.seconds(inside_bytes, messages))
    if nodes > 1 and links != "node":
        seconds.append(topology.between.seconds(link_bytes - inside_bytes, messages))
    return max(seconds)
