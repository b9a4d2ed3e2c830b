"""A plan held to its truth: what both sides train, and the verdict on every tensor that a rank holds at the end.

How a plan is trained, and which truth it has, a driver says (`verify_hooks`, `verify_schedule`, `verify_replay`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from armillary.plans.plan import Plan
from armillary.schedules.edges import codes_of
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of
from armillary.session.double_precision import is_repeatable
from armillary.session.run import Run
from armillary.session.truth import Truth
from armillary.session.verification import TOLERANCE, Acted, Acts, Difference, Verdict
from armillary.session.workload import Batch, TrainBatches, Workload

__all__ = ["RATE_DROP", "Begun", "Judged", "TrainedCase", "VerifiedCase", "apart", "judged"]

RATE_DROP = 0.1
NOT_REPEATABLE = (
    f"compared to {TOLERANCE:.0e} instead of every bit: MKL_CBWR was not set, so equal numbers may round otherwise at "
    f"another address. Set MKL_CBWR=COMPATIBLE before Python starts, on every rank"
)


class Begun(NamedTuple):
    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True)
class VerifiedCase:
    """What both sides train. Where steps are the schedule's, the rate falls after `half` of them.

    Args:
        label: the plan in words. every_bit: wanted where sums keep their order; None: if MKL's reproducible mode is set
            on every rank. joined: the workload with one batch of all workers together, for the one process.
        truths: of exact plans of this workload, by steps, as far as they are known.
    """

    workload: Workload
    plan: Plan
    steps: int
    seed: int
    label: str = ""
    every_bit: bool | None = None
    joined: Workload | None = None
    truths: dict[int, Truth] = field(default_factory=dict)

    @property
    def half(self) -> int:
        return self.steps // 2

    @property
    def options(self) -> ScheduleOptions:
        return options_of(self.plan)

    @property
    def micro_batches(self) -> int:
        """Of a step, those of all processes."""
        return self.options.total(self.plan.workers)

    def begun(self) -> Begun:
        """A new model, the same on every rank and in the one process."""
        torch.manual_seed(self.seed)
        model = self.workload.model()
        return Begun(model, self.workload.optimizer(model.parameters()))

    def rates(self, optimizer: Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, [self.half], RATE_DROP)

    def feed(self, micro_batch: int) -> Iterator[Batch]:
        """What one of a step's micro-batches is, step by step: two that return, where an edge remembers samples."""
        feed = TrainBatches(self.workload, (micro_batch, self.micro_batches), self.seed)
        if any(code.cache_bytes for code in codes_of(self.options.edges).values()):
            return cycle([next(feed), next(feed)])
        return feed


@dataclass(frozen=True)
class TrainedCase:
    """
    Args:
        run: open. mine: what this rank holds, by name. acts: of all ranks.
        ways: by parameter, how it crossed, where not by the schedule. departing: of parameters that crossed otherwise
            than exactly.
        is_in_order: whether the truth makes every sum in the same order, so that every bit can be wanted.
    """

    run: Run
    steps: int
    mine: Mapping[str, Tensor]
    acts: Acts
    ways: Mapping[str, str]
    departing: frozenset[str]
    is_in_order: bool


@dataclass(frozen=True)
class Judged:
    """What came of one plan; see `Verification`."""

    differences: tuple[Difference, ...]
    steps: int = 0
    tolerance: float = TOLERANCE
    note: str = ""
    acted: tuple[Acted, ...] = ()
    admitted: tuple[str, ...] = ()


def judged(case: VerifiedCase, trained: TrainedCase, truth: Truth) -> Judged:
    """Collective: ends the run. truth: the same on every rank."""
    run, plan, true = trained.run, case.plan, truth.of(trained.run.rank)
    transport = run._transport
    largest = transport.agree_largest([apart(mine, true[name]) for name, mine in trained.mine.items()])
    is_exact = case.every_bit
    if is_exact is None:
        is_exact = not any(transport.agree_largest([float(not is_repeatable())]))
    tolerance = 0.0 if is_exact and trained.is_in_order else TOLERANCE
    run.close(gather=False)
    differences = []
    for name, difference in zip(trained.mine, largest, strict=True):
        verdict: Verdict = "equal" if difference <= tolerance else "differs"
        if name in truth.quiet and (tolerance or not difference):
            verdict = "no gradient"
        way, is_trained = trained.ways.get(name, plan.schedule.name), name in plan.parameters
        is_other = name in trained.departing
        differences.append(Difference(name, case.label, way, difference, verdict, is_other, is_trained))
    note = NOT_REPEATABLE if trained.is_in_order and not is_exact else ""
    acted = tuple(Acted(case.label, *key, times) for key, times in trained.acts.items())
    admitted = tuple(one for one in plan.notes if one.startswith("NOT exact: "))
    return Judged(tuple(differences), trained.steps, tolerance, note, acted, admitted)


def apart(found: Tensor, true: Tensor) -> float:
    """Zero only if every bit is equal; else the difference over the true norm, or infinity where that says nothing."""
    if torch.equal(found, true):
        return 0.0
    difference = float((found - true).double().norm()) / (float(true.double().norm()) or 1.0)
    return difference if difference > 0.0 else float("inf")
