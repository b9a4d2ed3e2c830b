"""Parallax's rule: how a parameter is read decides how its gradient travels.

Kept as the plain function it is, beside the priced choice that generalises it (`planner.py`), so that the two can be
compared.

Source: Kim et al., Parallax (EuroSys 2019), section 3.1. Departures: "sparse" is how the parameter is read, not the
type of its gradient (a tied table, read by row and whole, is dense); servers are the workers themselves; nothing is
said of nearly dense tables, whose threshold the paper leaves open and the price finds.
"""

from collections.abc import Mapping
from types import MappingProxyType

from armillary.facts.group import Layout
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice

__all__ = ["LISTED", "PLAIN", "UNKNOWN", "parallax", "plain"]

# The exchange that a layout means where nobody says more.
PLAIN: Mapping[Layout, Choice] = MappingProxyType(
    {"replicated": Choice("all_reduce"), "row_sharded": Choice("owned_rows")}
)

# What a parameter goes by while nobody knows how it is read: the rows that some worker touched, or all.
UNKNOWN = Choice("sparse_all_reduce")

# What it goes by where its optimizer takes no gradient but one that lists its rows.
LISTED = Choice("sparse_all_reduce", {"keeps_rows": True})


def parallax(fact: ParameterFact) -> Choice:
    """`owned_rows` for a table that is only ever read by row and may live with owners; `all_reduce` for the rest."""
    return PLAIN["row_sharded" if fact.shardable else "replicated"]


def plain(name: str) -> Choice:
    """What a layout or an exchange means where it is only named."""
    return next((choice for layout, choice in PLAIN.items() if layout == name), Choice(name))
