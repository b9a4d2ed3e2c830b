"""What prefetch changes of the legs of a table: what leaves at another time, and what is left of its pull."""

from armillary.exchanges.exchange import RowExchange, RowTraffic
from armillary.exchanges.leg import Leg, Legs
from armillary.facts.topology import Topology

__all__ = ["prefetched_legs"]


def prefetched_legs(
    exchange: RowExchange, moved: RowTraffic, skew: float, staying: float | None, pays: bool, topology: Topology
) -> tuple[tuple[Leg, ...], Legs]:
    """What goes at another time, and what is left of pull and push. Ids leave with late rows and masks with a header;
    early rows of all tables are one message. Late rows are taken to go by themselves, as they do where they are many
    (`runtime/hybrid/prefetch`).

    Args:
        staying: share of a batch's rows that stay put, so that they go early; None where no row goes early.
    """
    assert exchange.early_legs is not None
    push = exchange.legs(moved, skew, topology).push
    early_legs = exchange.early_legs(moved, skew, staying or 0.0)
    ids, masks, early, late = (
        leg._replace(messages=messages) for leg, messages in zip(early_legs, (0, 0, int(pays), 1), strict=True)
    )
    return ((ids,) if staying is None else (ids, masks, early)), Legs((late,), push)
