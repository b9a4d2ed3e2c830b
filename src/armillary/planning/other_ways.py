"""Quicker ways to take the same steps: one note on a plan. `armillary advise` compares all of them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from armillary.plans.plan import Plan
from armillary.plans.units import seconds_text

__all__ = ["OTHER", "OtherWay", "with_quickest"]

OTHER = "quicker way: "


class OtherWay(NamedTuple):
    """Seconds of a step, now and by this way.

    Args of note:
        is_exact: what is not comes after what is, however quick. ask: how to ask for it.
    """

    name: str
    is_exact: bool
    now_seconds: float
    seconds: float
    ask: str

    @property
    def gain(self) -> float:
        return self.now_seconds / self.seconds

    def __str__(self) -> str:
        steps = f"simulated step {seconds_text(self.seconds)}, not {seconds_text(self.now_seconds)}"
        return f"{self.name}, {'exact' if self.is_exact else 'NOT exact'}, {steps}: {self.ask}"


def with_quickest(plan: Plan, ways: Iterable[OtherWay]) -> Plan:
    """The plan with a note on the exact way that gains most, and on the one that is not exact; without one where there
    is neither."""
    ordered = sorted(ways, key=lambda way: (not way.is_exact, -way.gain))
    best = {way.is_exact: way for way in reversed(ordered)}
    if not best:
        return plan
    said = "; or ".join(str(best[is_exact]) for is_exact in (True, False) if is_exact in best)
    return replace(plan, notes=(*plan.notes, f"{OTHER}{said}. armillary advise compares all methods"))
