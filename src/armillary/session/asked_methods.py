"""Asks every method what it would bring; and which would do best where the plan by price does not fit."""

from collections.abc import Callable

from armillary.plans.advice import Adviser, Situation, advisers, not_for
from armillary.session.advice_page import Row

__all__ = ["Told", "remedies", "rows_of", "silent"]

Told = Callable[[str], object]


def silent(text: str) -> None:
    return None


def rows_of(situation: Situation, told: Told = silent) -> list[Row]:
    """Of every method, by name.

    Args:
        told: hears who is asked.
    """
    rows = []
    for name, adviser in advisers().items():
        told(f"asking {name}")
        rows.append(_row(name, adviser, situation))
    return rows


def _row(name: str, adviser: Adviser, situation: Situation) -> Row:
    try:
        advice = adviser.ask(situation)
    except Exception as error:  # whatever one method raises, the others are asked
        advice = not_for(f"its advice failed: {type(error).__name__}: {error}")
    return Row(name, adviser.says, adviser.page, adviser.is_inference, advice, situation.topology.memory_bytes)


def remedies(situation: Situation, count: int = 2) -> list[str]:
    """What would fit where the plan by price does not: the quickest of the exact methods, then of the others."""
    found = [row for row in rows_of(situation) if not row.is_inference]
    fitting = [row for row in found if row.held_bytes is not None and row.fits]
    fitting.sort(key=lambda row: (bool(row.advice.departures), row.figure("seconds") or 0.0))
    return [row.in_words() for row in fitting[:count]]
