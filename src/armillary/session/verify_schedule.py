"""Trains a workload under a schedule that owns the loop and in one process, and compares every bit.

The one process runs `loss(model, batch)` of the whole model (`reference/whole_model.py`). What has a meaning at the
cuts only is compared with loops over stages. They count once they did all that the whole model does, which is a row of
its own.

The learning rate falls half-way, to catch late gradients that are applied at the wrong rate. The newest weights are
looked at in between, and the run is drained once. Where sums have another order (gloo's of three or more workers, tied
stages), or a process rounds by address, the two are compared to rounding.
"""

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.plans.plan import Plan
from armillary.reference.whole_model import Beside, beside_whole
from armillary.schedules.edges import codes_of
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of
from armillary.session.attach import attach
from armillary.session.double_precision import is_repeatable
from armillary.session.run import Run
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.stage_setup import cut_model
from armillary.session.truth import ROUNDING, ScheduleTruth, WholeTruth, departing, is_whole
from armillary.session.verification import (
    BESIDE,
    TOLERANCE,
    Acted,
    Acts,
    Difference,
    Verdict,
    Verification,
    acts_of,
    edge_acts,
    watched,
)
from armillary.session.workload import Batch, TrainBatches, Workload
from armillary.stages.partition import ties_of
from armillary.stages.stages import cut_at
from armillary.transport.agreement import by_rank_zero

__all__ = ["NOT_REPEATABLE", "RATE_DROP", "apart", "verify_schedule"]

RATE_DROP = 0.1
MOST_BESIDE = 4  # micro-batches
NOT_REPEATABLE = (
    f"compared to {TOLERANCE:.0e} instead of every bit: MKL_CBWR was not set, so equal numbers may round otherwise at "
    f"another address. Set MKL_CBWR=COMPATIBLE before Python starts, on every rank"
)

State = Mapping[str, Tensor]  # parameters and buffers, by name


class _Case(NamedTuple):
    """What both sides train. The rate falls after `half` steps, the drain comes a step later."""

    workload: Workload
    plan: Plan
    steps: int
    seed: int

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

    def feed(self, micro_batch: int) -> Iterator[Batch]:
        """What one of a step's micro-batches is, step by step: two that return, where an edge remembers samples."""
        feed = TrainBatches(self.workload, (micro_batch, self.micro_batches), self.seed)
        if any(code.cache_bytes for code in codes_of(self.options.edges).values()):
            return cycle([next(feed), next(feed)])
        return feed


def verify_schedule(
    workload: Workload, plan: Plan, steps: int, seed: int, every_bit: bool | None = None
) -> Verification:
    """Every rank must call it.

    Args:
        workload: in float64. plan: of it.
        every_bit: wanted where sums keep their order; None: if MKL's reproducible mode is set on every rank.

    Raises:
        ValueError: the schedule, the model or the loss do not fit.
    """
    case, nodes = _Case(workload, plan, steps, seed), plan.workers // plan.workers_per_node
    beside = _beside(case)
    rows_beside = tuple(_rows_beside(beside))
    if any(one.verdict == "differs" for one in rows_beside):
        note = f"{beside.said}; nothing was trained" if beside.said else "nothing was trained"
        return Verification(workload.name, plan.workers, 0, TOLERANCE, rows_beside, note, nodes=nodes)
    is_held_whole = is_whole(plan, beside.draws)
    whole, run, counted = _train(case)
    truths = by_rank_zero(run.transport, lambda: _truths(case, is_held_whole))
    truth = truths.states[run.rank if len(truths.states) == run.workers else 0]
    with run.newest():
        mine = dict(_state(run.model))
    differences_here = [apart(mine[name], truth[name]) for name in truth]
    largest = run.transport.agree_largest(differences_here)
    is_exact = not any(run.transport.agree_largest([float(not is_repeatable())])) if every_bit is None else every_bit
    options = case.options
    is_in_order = _is_summed_in_order(run) and not (is_held_whole and any(beside.differences.values()))
    tolerance = 0.0 if is_exact and is_in_order else TOLERANCE
    note = "" if is_exact or not is_in_order else NOT_REPEATABLE
    acts = acts_of(run.transport.share(counted))
    whole.close(gather=False)
    differences = list(rows_beside)
    lossy = {name: str(choice) for group, choice in departing(plan) for name in group.parameters}
    for name, difference in zip(truth, largest, strict=True):
        verdict: Verdict = "equal" if difference <= tolerance else "differs"
        if name in truths.quiet and (tolerance or not difference):
            verdict = "no gradient"
        way, is_trained = lossy.get(name, options.name), name in plan.parameters
        differences.append(Difference(name, _said(options), way, difference, verdict, name in lossy, is_trained))
    acted = tuple(Acted(_said(options), *key, times) for key, times in acts.items())
    admitted = tuple(one for one in plan.notes if one.startswith("NOT exact: "))
    return Verification(
        workload.name, plan.workers, steps, tolerance, tuple(differences), note, acted, admitted=admitted, nodes=nodes
    )


def _beside(case: _Case) -> Beside:
    """The stages beside the whole model, on the micro-batches of a step. A model that is not cut is whole anyway."""
    if not case.options.method.is_cut:
        return Beside({}, frozenset(), "", draws=True)
    torch.manual_seed(case.seed)
    model, options = case.workload.model(), case.options
    batches = [next(case.feed(number)) for number in range(min(case.micro_batches, MOST_BESIDE))]
    cut = cut_model(case.workload.loss, model, batches[0], options, cut_at)
    return beside_whole(model, case.workload.loss, cut, batches, case.seed)


def _rows_beside(beside: Beside) -> Iterator[Difference]:
    for name, difference in beside.differences.items():
        verdict: Verdict = "equal" if difference <= TOLERANCE else "differs"
        if name in beside.quiet:
            verdict = "no gradient"
        yield Difference(name, BESIDE, "none, in one process", difference, verdict, is_trained=False)


def _is_summed_in_order(run: OwnedLoop) -> bool:
    """Whether every sum is made in the reference's order. gloo's of three ranks is not; nor is that of a parameter
    which stages share: one process adds both gradients micro-batch by micro-batch."""
    if ties_of(run.parts.stages):
        return False
    sums = run.workers if run.options.method.is_even else run.options.replicas(run.workers)
    return sums < 3


def _said(options: ScheduleOptions) -> str:
    said = f"{options.name}, slack {options.slack}, {options.micro_batches} micro-batches, {options.stages} stages"
    said += f", {' and '.join(options.corrections)}" if options.corrections else ""
    said += ", coded edges" if options.edges else ""
    return said if options.clip is None else f"{said}, clipped at {options.clip.max_norm:g} by {options.clip.by}"


def _train(case: _Case) -> tuple[Run, OwnedLoop, Acts]:
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    count = case.micro_batches
    example = next(TrainBatches(case.workload, (0, count), case.seed))
    whole = attach(case.plan, model, optimizer, loss=case.workload.loss, example=example, seed=case.seed)
    run = whole._engine
    assert isinstance(run, OwnedLoop)
    acts = watched(whole)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [case.half], RATE_DROP)
    feeds = [case.feed(micro_batch) for micro_batch in run.micro_batches]
    for step in range(case.steps):
        if step == case.half:
            with run.newest():
                pass
        if step == case.half + 1:
            run.drain()
        whole.step([next(feed) for feed in feeds])
        scheduler.step()
    run.drain()
    acts.update(edge_acts(whole))
    return whole, run, acts


class _Truths(NamedTuple):
    """What every process must hold at the end: one for all, but where workers keep buffers of their own.

    quiet: parameters whose gradient was zero but for rounding at every step.
    """

    states: list[dict[str, Tensor]]
    quiet: frozenset[str]


def _truths(case: _Case, is_held_whole: bool) -> _Truths:
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    feeds = [case.feed(micro_batch) for micro_batch in range(case.micro_batches)]
    truth: WholeTruth | ScheduleTruth = WholeTruth(case.plan, model, optimizer, case.workload.loss)
    if not is_held_whole:
        example = next(TrainBatches(case.workload, (0, case.micro_batches), case.seed))
        cut = cut_model(case.workload.loss, model, example, case.options)
        truth = ScheduleTruth(case.plan, model, optimizer, cut, case.seed)
    norms: dict[str, float] = {}
    optimizer.register_step_pre_hook(lambda *_: norms.update(_larger(norms, model)))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [case.half], RATE_DROP)
    for step in range(case.steps):
        if step == case.half + 1:
            truth.drain()
        truth.step([next(feed) for feed in feeds])
        scheduler.step()
    limit = ROUNDING * max(norms.values(), default=0.0)
    quiet = frozenset(name for name, norm in norms.items() if norm <= limit)
    return _Truths([dict(_state(model)) | buffers for buffers in truth.own_buffers() or [{}]], quiet)


def _larger(norms: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    """The larger of each known norm and that of the gradient now."""
    now = {name: 0.0 if p.grad is None else float(p.grad.norm()) for name, p in model.named_parameters()}
    return {name: max(norm, norms.get(name, 0.0)) for name, norm in now.items()}


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.detach().clone()


def apart(found: Tensor, true: Tensor) -> float:
    """Zero only if every bit is equal; else the difference over the true norm, or infinity where that says nothing."""
    if torch.equal(found, true):
        return 0.0
    difference = float((found - true).double().norm()) / (float(true.double().norm()) or 1.0)
    return difference if difference > 0.0 else float("inf")
