"""Asks every method what it would bring; and which would do best where the plan by price does not fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from armillary.planning.memory import NothingFits
from armillary.plans.advice import Adviser, Situation, advisers, not_for
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.profiler.unfit_model import refusing_collectives
from armillary.session.advice_page import Row
from armillary.session.model_to_plan import ModelToPlan
from armillary.session.situation import situation_of

__all__ = ["Told", "naming_remedies", "rows_of", "silent"]

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


@contextmanager
def naming_remedies(subject: ModelToPlan, topology: Topology, found: Profile | None = None) -> Iterator[None]:
    """Where nothing fits, the error names the two methods that would do best.

    Args:
        found: the model's profile; None: it is made where it is wanted.
    """
    try:
        yield
    except NothingFits as error:
        try:
            with refusing_collectives():  # rank 0 asks alone
                would = _remedies(situation_of(subject, topology, found))
        except Exception:  # what went wrong first is what the caller must hear
            would = []
        if not would:
            raise
        others = "\n".join(f"  {one}" for one in would)
        raise NothingFits(f"{error}\nOf all methods (armillary advise), these would do best:\n{others}") from None


def _remedies(situation: Situation, count: int = 2) -> list[str]:
    """What would fit where the plan by price does not: the quickest of the exact methods, then of the others."""
    found = [row for row in rows_of(situation) if not row.is_inference]
    fitting = [row for row in found if row.held_bytes is not None and row.fits]
    fitting.sort(key=lambda row: (bool(row.advice.departures), row.figure("seconds") or 0.0))
    return [row.in_words() for row in fitting[:count]]
