"""What can be demanded of a plan by name: a layout, an exchange, a departure that it may choose.

Names are looked at before anything is run: the command line does so before torch is imported, from lists of its own.
Whether a demand can be honoured is for `constraints` to say.
"""

from collections.abc import Collection, Iterable

from armillary.facts.choice import Choice
from armillary.facts.registry import guess

__all__ = ["LAYOUTS", "MAY_BE_ALLOWED", "Constraint", "refuse_other_allowed", "refuse_unlisted", "written"]

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
