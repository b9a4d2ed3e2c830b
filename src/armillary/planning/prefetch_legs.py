"""What prefetch changes of the legs of a table: what leaves at another time, and what is left of pull and push."""

from typing import NamedTuple

from armillary.exchanges.exchange import RowExchange, RowTraffic
from armillary.exchanges.leg import Leg, Legs
from armillary.facts.group import PrefetchKind
from armillary.facts.parameter import RowFacts
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.traffic import staying_share

__all__ = ["Shares", "prefetched_legs"]


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
    they do where they are many (`runtime/hybrid/prefetch`)."""
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
