"""What came of a comparison with one process: a difference for every parameter, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from armillary.facts.plan_words import number_of
from armillary.facts.table import Page, Table, page_text

__all__ = ["BESIDE", "TOLERANCE", "Acted", "Difference", "Verdict", "Verification"]

TOLERANCE = 1e-10
BESIDE = "stages beside the whole model"
NOTHING_JUDGED = "nothing judged, so neither equal nor not"

Verdict = Literal["equal", "differs", "no gradient"]


@dataclass(frozen=True)
class Difference:
    """One parameter under one plan: |workers - one process| / |one process| in norm, the largest of all ranks.

    verdict: "no gradient" where the true gradient is zero, so that only rounding moves the tensor (an attention's key
    bias, what no batch reads); its difference says nothing and is not judged.
    departs: whether the exchange is not exact, and is held to what it says of itself instead of to one process.
    is_trained: whether it is a parameter after training; not a buffer, nor a look at the model before.
    """

    parameter: str
    plan: str
    exchange: str
    difference: float
    verdict: Verdict
    departs: bool = False
    is_trained: bool = True


@dataclass(frozen=True)
class Acted:
    """How many times, over all ranks and groups, a mechanism of an exchange of that plan acted."""

    plan: str
    exchange: str
    mechanism: str
    times: int


@dataclass(frozen=True)
class Verification:
    """What came of it. note: why less is claimed than could be. lowered: options that are not as they were asked for,
    so that all that they put off happens in a few steps. admitted: where the
    schedule is not exact, as the plan says it. nodes: on which the workers were found."""

    workload: str
    workers: int
    steps: int
    tolerance: float
    differences: tuple[Difference, ...]
    note: str = ""
    acted: tuple[Acted, ...] = ()
    lowered: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    nodes: int = 1

    @property
    def is_equal(self) -> bool:
        """Whether something was judged, and all of that is equal."""
        return bool(self.judged) and all(one.verdict == "equal" for one in self.judged)

    @property
    def judged(self) -> tuple[Difference, ...]:
        """What says something. A run that took no step, or whose parameters got no gradient, says nothing."""
        judged = tuple(one for one in self.differences if one.verdict != "no gradient")
        has_trained = self.steps > 0 and any(one.is_trained for one in judged)
        return judged if has_trained or any(one.verdict == "differs" for one in judged) else ()

    @property
    def idle(self) -> tuple[Acted, ...]:
        """Mechanisms that never acted, of which equality says nothing."""
        return tuple(one for one in self.acted if not one.times)

    def page(self) -> Page:
        """What it prints: the verdict, a row for every plan, then every parameter that differs."""
        judged = self.judged
        verdict = "equal" if self.is_equal else "NOT equal"
        worst = max((one.difference for one in judged), default=0.0)
        departs = any(one.departs for one in judged)
        reference = "their references (NOT exact, see below)" if departs else "one process"
        if not judged:
            return (f"{self.workload}: {NOTHING_JUDGED} ({self._why_nothing()})",)
        words = (
            f"{self.workload}: {self.workers} workers on {number_of(self.nodes, 'node')} and {reference} are {verdict} "
            f"after {self.steps} steps in float64; largest difference {worst:.1e}, tolerance {self.tolerance:.0e} of a "
            "tensor's norm"
        )
        parts: list[str | Table] = [words, _by_plan(judged)]
        if len({one.plan for one in judged if one.is_trained}) > 1:
            parts.append("planned is the plan of this job; each row below it forces one exchange")
        if any(one.plan == BESIDE for one in judged):
            parts.append(f"{BESIDE}: their output, loss, gradients and buffers in one process, before training")
        parts += [f"{one}. The one process does the same" for one in self.admitted]
        for exchange in dict.fromkeys(one.exchange for one in judged if one.departs):
            parts.append(f"NOT exact, held to its own oracle instead of one process: {exchange}")
        parts += [f"lowered, so that all of it happens in a few steps: {one}" for one in self.lowered]
        if self.acted:
            rows = [(one.plan, one.exchange, one.mechanism, f"{one.times:,}") for one in self.acted]
            parts.append(Table(("plan", "exchange", "what it did", "times"), rows, (0, 1, 2)))
        for one in self.idle:
            parts.append(
                f"NOT exercised: {one.exchange}: {one.mechanism}: never on {self.workers} workers in {self.steps} "
                "steps; verify on more workers or steps, or a model that asks for it"
            )
        if differing := [one for one in judged if one.verdict == "differs"]:
            rows = [(one.parameter, one.plan, one.exchange, f"{one.difference:.1e}") for one in differing]
            parts.append(Table(("differs", "plan", "exchange", "difference"), rows, (0, 1, 2)))
        if apart := sorted({one.parameter for one in self.differences if one.verdict == "no gradient"}):
            parts.append(f"not judged, since the true gradient is zero: {', '.join(apart)}")
        return (*parts, *([f"note: {self.note}"] if self.note else []))

    def _why_nothing(self) -> str:
        if not self.steps:
            return "no step was taken"
        return "no parameter got a gradient" if self.differences else "the model has no parameter to train"

    def __str__(self) -> str:
        return page_text(self.page())


def _by_plan(judged: Sequence[Difference]) -> Table:
    """A row for every plan: where it is furthest from one process."""
    plans: dict[str, list[Difference]] = {}
    for one in judged:
        plans.setdefault(one.plan, []).append(one)
    rows = []
    for plan, those in plans.items():
        worst, count = max(those, key=lambda one: one.difference), len(those)
        equal = sum(one.verdict == "equal" for one in those)
        furthest = worst.parameter if worst.difference else ""
        rows.append((plan, f"{equal} of {count}", f"{worst.difference:.1e}", furthest))
    return Table(("plan", "tensors equal", "largest difference", "of"), rows, (0, 3))
