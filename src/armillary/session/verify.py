"""Trains a workload twice, in one process and on all workers under a plan, and compares every tensor.

The one process is plain PyTorch over the same per-worker batches (`reference/serial`), which knows no exchange and no
runtime. In float64 the two must agree to rounding. Every exchange is forced in turn, so that not only the one a plan
happens to choose is held to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from armillary.exchanges.exchange import dense_exchanges, row_exchanges
from armillary.facts.plan import Choice, Plan
from armillary.facts.profile_table import aligned
from armillary.reference.serial import train_step
from armillary.runtime.hybrid.handle import TableHandle
from armillary.session.attach import attach
from armillary.session.decide import Wishes, decide, open_transport, subject_of
from armillary.session.feed import Feed, stream_seed
from armillary.session.forced import forced
from armillary.session.in_double import InDouble
from armillary.session.rank_zero import by_rank_zero
from armillary.session.run import Run
from armillary.session.workload import Batch, Workload

__all__ = ["TOLERANCE", "Difference", "Verification", "verify"]

TOLERANCE = 1e-10
ROUNDING = 1e-12  # a gradient this small beside the largest one is zero but for rounding

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
    """What came of it."""

    workload: str
    workers: int
    steps: int
    tolerance: float
    differences: tuple[Difference, ...]

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
        return "\n".join(lines)


class Truth(NamedTuple):
    """The one process. quiet: parameters that only rounding moved."""

    values: dict[str, Tensor]
    quiet: frozenset[str]


def verify(
    workload: Workload,
    *,
    steps: int = 5,
    seed: int = 0,
    wishes: Wishes | None = None,
    exchanges: Sequence[str] | Literal["every"] = "every",
    global_batch: Workload | None = None,
) -> Verification:
    """Compares the plan and every forced exchange with one process; every rank must call it.

    Args:
        wishes: of the plan, as in training.
        exchanges: to force besides. One that carries nothing otherwise than an earlier plan is left out.
        global_batch: the same workload with a batch of all workers together. Given, the one process takes steps on
            that, which is equal only without batch statistics, per-worker randomness and cross-sample losses.

    Raises:
        ValueError: a wish cannot be granted.
    """
    double = InDouble(workload)
    decided = decide(subject_of(double, seed), wishes or Wishes())
    transport = open_transport()
    one, places = (double, transport.place.workers) if global_batch is None else (InDouble(global_batch), 1)
    truth = by_rank_zero(transport, lambda: _one_process(one, places, steps, seed))
    transport.close()
    per_node = decided.plan.workers_per_node
    plans = {"planned": decided.plan}
    names = (*dense_exchanges(), *row_exchanges()) if exchanges == "every" else exchanges
    plans |= {name: forced(decided.profile, Choice(name), per_node) for name in names}
    differences: list[Difference] = []
    for name, plan in _distinct(plans).items():
        differences += _compare(double, name, plan, truth, (steps, seed))
    return Verification(workload.name, decided.plan.workers, steps, TOLERANCE, tuple(differences))


def _distinct(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Without those that carry every parameter as an earlier one does."""
    seen, distinct = [], {}
    for name, plan in plans.items():
        way = {parameter: (group.exchange, group.update) for group in plan.groups for parameter in group.parameters}
        if way not in seen:
            seen.append(way)
            distinct[name] = plan
    return distinct


def _one_process(workload: Workload, workers: int, steps: int, seed: int) -> Truth:
    """The truth, and which gradients were zero but for rounding at every step."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    feeds = [Feed(workload, (worker, workers), seed) for worker in range(workers)]
    norms: dict[str, float] = dict.fromkeys((name for name, _ in model.named_parameters()), 0.0)
    for step in range(steps):
        batches = [(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
        train_step(model, optimizer, batches, lambda net, seeded: _seeded_loss(workload, net, seeded))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norms[name] = max(norms[name], float(parameter.grad.norm()))
    limit = ROUNDING * max(norms.values())
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Truth(values, frozenset(name for name, norm in norms.items() if norm <= limit))


def _seeded_loss(workload: Workload, model: nn.Module, seeded: tuple[int, Batch]) -> Tensor:
    torch.manual_seed(seeded[0])
    return workload.loss(model, seeded[1])


def _compare(
    workload: Workload, name: str, plan: Plan, truth: Truth, steps_seed: tuple[int, int]
) -> Iterator[Difference]:
    run = _train(workload, plan, *steps_seed)
    found = dict(_whole(run))
    mine = [_relative(found[parameter], truth.values[parameter]) for parameter in plan.parameters]
    largest = run.transport.agree_largest(mine)
    run.detach()
    run.transport.close()
    for parameter, difference in zip(plan.parameters, largest, strict=True):
        verdict: Verdict = "equal" if difference <= TOLERANCE else "differs"
        if parameter in truth.quiet:
            verdict = "no gradient"
        yield Difference(parameter, name, str(plan.group_of(parameter).exchange), difference, verdict)


def _train(workload: Workload, plan: Plan, steps: int, seed: int) -> Run:
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    run = attach(plan, model, optimizer, check_order=True)
    feed = Feed(workload, (run.rank, run.workers), seed)
    for step, batch in enumerate(islice(feed, steps)):
        optimizer.zero_grad(set_to_none=True)
        _seeded_loss(workload, model, (stream_seed(seed, step, run.rank), batch)).backward()
        optimizer.step()
    run.finish()
    return run


def _whole(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as this rank sees it, by plain look-ups where it is owned by rows."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            is_table = isinstance(parameter, TableHandle)
            yield name, parameter[torch.arange(len(parameter))] if is_table else parameter.detach()


def _relative(found: Tensor, true: Tensor) -> float:
    """|found - true| / |true| in norm; infinite where it is not a number."""
    difference = float((found - true).norm()) / (float(true.norm()) or 1.0)
    return difference if difference == difference else float("inf")
