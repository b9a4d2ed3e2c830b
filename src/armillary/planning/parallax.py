"""Parallax's rule: how a parameter is read decides how its gradient travels.

Kept as the plain function it is, beside the priced choice that generalises it (`planner.py`), so that the two can be
compared.

Source: Kim et al., Parallax (EuroSys 2019), section 3.1. Departures: "sparse" is how the parameter is read, not the
type of its gradient (a tied table, read by row and whole, is dense); servers are the workers themselves; nothing is
said of nearly dense tables, whose threshold the paper leaves open and the price finds.
"""

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice

__all__ = ["parallax"]


def parallax(fact: ParameterFact) -> Choice:
    """`owned_rows` for a table that is only ever read by row and may live with owners; `all_reduce` for the rest."""
    return Choice("owned_rows") if fact.shardable else Choice("all_reduce")
