"""One stretch of an exchange as the links see it: what pricing needs to know, said by the exchange itself.

A leg tells what passes the busiest rank's link and how many messages wait for one another there. It has no seconds:
those are made of it and a topology (`planning/leg_seconds.py`), so an exchange is priced without being known by name.
"""

from typing import Literal, NamedTuple

__all__ = ["EarlyLegs", "Leg", "Legs", "Links"]

Links = Literal["slowest", "everyone", "neighbour", "node", "rail"]


class Leg(NamedTuple):
    """
    links: "slowest": every byte passes the slowest link there is; "everyone": even pieces to all other ranks, of which
        those inside the node and those beyond it leave by different links at once; "neighbour": each rank sends to the
        next one, so a node's last rank alone sends beyond it; "node", "rail": to the other ranks of the node, or to the
        ranks of the same place in the other nodes.
    link_bytes: through the busiest link in one direction. messages: that wait for one another, each for one latency.
    request: the kind that is made, by the name of its class: links serve some kinds better than others.
    """

    links: Links
    link_bytes: float
    messages: float
    request: str = "AllToAll"


class Legs(NamedTuple):
    """Of a row exchange: `pull` delays forward, `push` follows in backward and may hide behind what is left of it. A
    push has one leg a request, in order: programs that are under way together take turns."""

    pull: tuple[Leg, ...]
    push: tuple[Leg, ...]


class EarlyLegs(NamedTuple):
    """Of a pull that is prefetched, in the order of its requests. What is not `late` leaves before the step it is for.

    ids: asked for; masks: which of the rows stay put until they are read; early: those rows; late: the others.
    """

    ids: Leg
    masks: Leg
    early: Leg
    late: Leg
