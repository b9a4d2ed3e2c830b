"""Seconds of the legs of an exchange over the links of a topology, and the rows and optimizer work behind them.

Legs follow one another at the rank whose link is busiest; nothing is hidden behind compute (that is the simulator's
business). Each also takes a rank what calling it and waking threads takes, once, since messages that follow in a row
find them awake. Where a topology was measured, each kind of request has links of its own.

Rows that more workers touch follow Heaps' law: distinct rows grow as a power of the rows asked for, the table's own.

Source: Thakur, Rabenseifner and Gropp (2005): latency once a message, bandwidth on what passes the link; Heaps,
Information Retrieval (1978). Departure: an all-to-all posts all its pieces at once, so it waits for one latency, not
for N - 1.

Note [Ring]. A rank's link between nodes is its share of the node's card. Of a ring only the node's last rank sends
beyond the node, and so has the shares of all its ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from armillary.exchanges.dense import Leg, Legs
from armillary.exchanges.exchange import RowExchange, RowTraffic
from armillary.plans.group import PrefetchKind
from armillary.plans.profile import Profile, RowFacts
from armillary.plans.topology import Topology

__all__ = [
    "Busy",
    "Shares",
    "Upkeep",
    "busiest_share",
    "busy",
    "leg_seconds",
    "merged_rows",
    "prefetched_legs",
    "staying_share",
    "traffic",
    "traffic_merged",
]


def merged_rows(facts: RowFacts, profile: Profile, workers: int) -> float:
    """Distinct rows that `workers` workers read together in one step; as measured where it was, else by Heaps' law."""
    measured = {
        profile.workers: facts.alpha_union,
        profile.workers_per_node: facts.alpha_node,
        1: facts.alpha_worker,
    }
    if workers in measured:
        return measured[workers] * facts.rows
    one = facts.alpha_worker * facts.rows
    if profile.workers > 1 and one > 0:
        exponent = math.log(facts.alpha_union / facts.alpha_worker) / math.log(profile.workers)
    else:
        exponent = _exponent_inside(facts)
    return min(float(facts.rows), one * math.pow(workers, exponent))


def _exponent_inside(facts: RowFacts) -> float:
    """Heaps' exponent inside one batch: `ids` asked for are `distinct` rows."""
    distinct = facts.alpha_worker * facts.rows
    return math.log(distinct) / math.log(facts.ids) if facts.ids > 1 and distinct > 1 else 1.0


def traffic_merged(facts: RowFacts, profile: Profile, topology: Topology) -> RowTraffic:
    """As if a step made one look-up: for exchanges that merge a step's look-ups before they send.

    `away` is (N - 1) / N for any number of owners: over all workers, the shares they own themselves add up to 1.
    """
    return RowTraffic(
        distinct_rows=merged_rows(facts, profile, 1),
        node_rows=merged_rows(facts, profile, topology.workers_per_node),
        row_bytes=facts.row_bytes,
        lookups=1,
        away=(topology.workers - 1) / topology.workers,
    )


def traffic(facts: RowFacts, profile: Profile, topology: Topology) -> RowTraffic:
    """Distinct rows per look-up, added up over the look-ups of a step.

    Taken one by one, a row read by several look-ups counts several times. Where the profile has not told them apart,
    with L look-ups alike in size, Heaps' law gives L ** (1 - exponent) times the merged rows: between 1 (the law of new
    rows for every id) and L (all read the same rows), and never more than ids. Exact for one look-up.
    """
    merged = traffic_merged(facts, profile, topology)
    lookups = max(1, math.ceil(facts.lookups))
    repeats = _repeats(facts)
    return merged._replace(
        distinct_rows=merged.distinct_rows * repeats, node_rows=merged.node_rows * repeats, lookups=lookups
    )


def _repeats(facts: RowFacts) -> float:
    """How many look-ups of a step read a row, in the mean over the rows that one reads."""
    distinct = facts.alpha_worker * facts.rows
    if distinct <= 0:
        return 1.0
    if facts.asked_rows is not None:
        return facts.asked_rows / distinct
    by_law: float = max(1.0, facts.lookups) ** (1 - min(1.0, _exponent_inside(facts)))
    return min(by_law, max(1.0, facts.ids / distinct))


def busiest_share(facts: RowFacts, owners: int, order: str) -> float:
    """Share of all rows sent that the busiest of `owners` owners gets, rows dealt out in that order (`Ownership`).

    The profile has the loads of its own W workers; those of fewer owners follow where their number divides W. Otherwise
    even shares are assumed.
    """
    load = facts.load_hashed if order == "hashed" else facts.load_modulo
    together, left = divmod(len(load), owners)
    if left:
        return 1 / owners
    if order == "hashed":  # blocks of scattered ids: neighbouring blocks join
        return max(sum(load[first : first + together]) for first in range(0, len(load), together))
    return max(sum(load[first::owners]) for first in range(owners))


def staying_share(facts: RowFacts, profile: Profile, workers: int, steps: int = 1) -> float:
    """Share of the rows of a worker's batch that no worker read in so many steps before, so that no step moves them. As
    many are not read in so many steps after.

    As measured where it was, for one step. Else consecutive batches are taken to repeat one another as batches of
    different workers do: what stays are the new rows that one more worker would bring.
    """
    own = merged_rows(facts, profile, 1)
    if own <= 0:
        return 0.0
    one, all_steps = (_new_rows(facts, profile, workers * count) for count in (1, steps))
    if workers == profile.workers and facts.repeated is not None:
        return (1 - facts.repeated) * (all_steps / one if one > 0 else 1.0)
    return all_steps / own


def _new_rows(facts: RowFacts, profile: Profile, workers: int) -> float:
    """Rows that one more worker would bring."""
    more = merged_rows(facts, profile, workers + 1) - merged_rows(facts, profile, workers)
    return min(merged_rows(facts, profile, 1), max(0.0, more))


@dataclass(frozen=True)
class Upkeep:
    """As `Assumptions` has it for parameters that no entry names. The default is Adam's."""

    optimizer_slots: int = 2
    moves_quiet_rows: bool = True
    step_slots: float = 0.0
    mixes_rows: str = ""
    lists_rows: bool = False
    stays_whole: str = ""

    def __post_init__(self) -> None:
        if min(self.optimizer_slots, self.step_slots) < 0:
            raise ValueError(
                f"pricing: of a parameter want optimizer_slots and step_slots >= 0, got {self.optimizer_slots} and "
                f"{self.step_slots}"
            )


class Shares(NamedTuple):
    """Of the rows of a batch: those that stay put, None where no row goes early; those of which gradients wait, None
    where none does."""

    staying: float | None
    resting: float | None

    @classmethod
    def of(cls, rows: RowFacts, prefetch: PrefetchKind, profile: Profile, topology: Topology) -> "Shares":
        """Rows stay put if no rank reads them in the batch before; and, where gradients may be under way, in the one
        before that."""
        one, two = (staying_share(rows, profile, topology.workers, steps) for steps in (1, 2))
        return {"rows": cls(one, None), "gradients": cls(two, one)}.get(prefetch, cls(None, None))


def prefetched_legs(
    exchange: RowExchange, moved: RowTraffic, skew: float, shares: Shares, pays: bool, topology: Topology
) -> tuple[tuple[Leg, ...], Legs]:
    """What goes at another time, and what is left of pull and push. Ids leave with late rows and masks with a header;
    early rows of all tables are one message, so are gradients that wait. Late rows are taken to go by themselves, as
    they do where they are many (`tables/lookups`)."""
    assert exchange.early_legs is not None
    push = exchange.legs(moved, skew, topology).push
    early_legs = exchange.early_legs(moved, skew, shares.staying or 0.0)
    ids, masks, early, late = (
        leg._replace(messages=messages) for leg, messages in zip(early_legs, (0, 0, int(pays), 1), strict=True)
    )
    if shares.staying is None:
        return (ids,), Legs((late,), push)
    if shares.resting is None:
        return (ids, masks, early), Legs((late,), push)
    masks = masks._replace(link_bytes=2 * masks.link_bytes)
    waiting = Leg("everyone", shares.resting * sum(leg.link_bytes for leg in push), int(pays))
    now = tuple(leg._replace(link_bytes=(1 - shares.resting) * leg.link_bytes) for leg in push)
    return (ids, masks, early, waiting), Legs((late,), now)


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
