"""By which rule a plan is made: of what can be priced the cheapest, or Parallax's own (`parallax.py`).

Source: Kim et al., Parallax (EuroSys 2019).
"""

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["PARALLAX", "PRICE", "RULES", "refuse_unknown_rule", "refuse_with_rule"]

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
