"""What can be demanded of a plan by name: a layout, an exchange, a departure that it may choose, a rule.

Names are looked at before anything is run: the command line does so before torch is imported, from lists of its own.
Whether a demand can be honoured is for `constraints` to say. The rule is the cheapest price, or Parallax's own (Kim et
al., EuroSys 2019; `partition_search.py`).
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from armillary.plans.registry import Choice, guess

__all__ = [
    "LAYOUTS",
    "MAY_BE_ALLOWED",
    "PARALLAX",
    "PRICE",
    "RULES",
    "Constraint",
    "refuse_other_allowed",
    "refuse_unknown_rule",
    "refuse_unlisted",
    "refuse_with_rule",
    "written",
]

PRICE, PARALLAX = "price", "parallax"
RULES = (PRICE, PARALLAX)


def refuse_unknown_rule(rule: object) -> None:
    """
    Raises:
        ValueError: there is no such rule.
    """
    if rule not in RULES:
        near = difflib.get_close_matches(str(rule), RULES, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"plan: no rule {rule!r}; there are {', '.join(RULES)}{meant}")


def refuse_with_rule(rule: str, wanted: Mapping[str, Any]) -> None:
    """
    Args:
        wanted: name -> what was asked, empty where nothing was; of what only prices decide.

    Raises:
        ValueError: there is no such rule, or one that asks no price is to honour what prices decide.
    """
    refuse_unknown_rule(rule)
    if rule != PRICE and (found := [name for name, asked in wanted.items() if asked]):
        raise ValueError(
            f"plan: under rule {rule!r} no price decides, so {', '.join(found)} cannot be honoured; drop it, or take "
            f"rule {PRICE!r}"
        )


Constraint = str | Choice

LAYOUTS = ("replicated", "row_sharded")
MAY_BE_ALLOWED = ("lossy",)  # departures among which a plan may choose by price, where the user says so


def written(constraint: Constraint) -> Constraint:
    """The same, however it was written: owned_rows(owners=2) as text is the choice, a layout is its bare name.

    Raises:
        ValueError: the text is no choice.
    """
    if isinstance(constraint, str) and "(" in constraint:
        constraint = Choice.parse(constraint)
    if isinstance(constraint, Choice) and constraint.name in LAYOUTS and not constraint.options:
        return constraint.name
    return constraint


def refuse_unlisted(pattern: str, constraint: Constraint, exchanges: Iterable[str]) -> None:
    """
    Raises:
        ValueError: it is no layout, and none of these exchanges.
    """
    name = constraint.name if isinstance(constraint, Choice) else constraint
    listed = sorted(exchanges)
    if name not in listed and (isinstance(constraint, Choice) or name not in LAYOUTS):
        known = (*LAYOUTS, *listed)
        raise ValueError(
            f"plan: {pattern!r} is to be {name!r}, which is no layout and no exchange; there are "
            f"{', '.join(known)}; {guess(str(name), known)}"
        )


def refuse_other_allowed(allow: object) -> None:
    """
    Raises:
        ValueError: it is no collection of departures that may be allowed.
    """
    if isinstance(allow, str) or not isinstance(allow, Collection) or set(allow) - set(MAY_BE_ALLOWED):
        raise ValueError(
            f"plan: allow is {allow!r}; want some of {MAY_BE_ALLOWED}, as in allow=('lossy',). What departs otherwise "
            "is taken where it is named"
        )
