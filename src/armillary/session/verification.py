"""What came of a comparison with one process: a difference for every parameter, and the verdict."""

from dataclasses import dataclass
from typing import Literal

from armillary.facts.profile_table import aligned

__all__ = ["TOLERANCE", "Difference", "Verdict", "Verification"]

TOLERANCE = 1e-10

Verdict = Literal["equal", "differs", "no gradient"]


@dataclass(frozen=True)
class Difference:
    """One parameter under one plan: |workers - one process| / |one process| in norm, the largest of all ranks.

    verdict: "no gradient" where the true gradient is zero, so that only rounding moves the tensor (an attention's key
    bias, what no batch reads); its difference says nothing and is not judged.
    """

    parameter: str
    plan: str
    exchange: str
    difference: float
    verdict: Verdict


@dataclass(frozen=True)
class Verification:
    """What came of it. note: why less is claimed than could be."""

    workload: str
    workers: int
    steps: int
    tolerance: float
    differences: tuple[Difference, ...]
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return all(one.verdict != "differs" for one in self.differences)

    def __str__(self) -> str:
        judged = [one for one in self.differences if one.verdict != "no gradient"]
        rows = [(one.parameter, one.plan, one.exchange, f"{one.difference:.1e}", one.verdict) for one in judged]
        lines = [aligned(("parameter", "plan", "exchange", "difference", "verdict"), rows, left=(0, 1, 2, 4))]
        if apart := sorted({one.parameter for one in self.differences if one.verdict == "no gradient"}):
            lines.append(f"\nnot judged, since the true gradient is zero: {', '.join(apart)}")
        worst = max((one.difference for one in judged), default=0.0)
        verdict = "equal" if self.is_equal else "NOT equal"
        lines.append(
            f"\n{self.workload}: {self.workers} workers and one process are {verdict} after {self.steps} steps in "
            f"float64; largest difference {worst:.1e}, tolerance {self.tolerance:.0e} of a tensor's norm"
        )
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)
