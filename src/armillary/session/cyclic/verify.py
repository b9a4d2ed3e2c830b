"""Trains a workload under a cyclic schedule and by `reference/cyclic`, and compares every tensor bit for bit.

The reference is plain loops in one process; it knows no runtime. The learning rate falls half-way, which replicas that
apply late gradients at the wrong rate do not survive; the newest weights are looked at in between, and the run is
drained once, which the reference is told.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.facts.plan import Plan
from armillary.reference.cyclic import Reference
from armillary.schedules.cyclic_modes import read_options
from armillary.session.cyclic.drive import CyclicRun, drive
from armillary.session.cyclic.split_loss import SplitLoss
from armillary.session.cyclic.stages import stages_of
from armillary.session.decide import Wishes, decide, subject_of
from armillary.session.feed import Feed
from armillary.session.in_double import InDouble
from armillary.session.rank_zero import by_rank_zero
from armillary.session.verify import Difference, Verdict, Verification
from armillary.session.workload import Workload

__all__ = ["verify_cyclic"]

RATE_DROP = 0.1

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


def verify_cyclic(workload: Workload, *, wishes: Wishes, steps: int = 5, seed: int = 0) -> Verification:
    """Compares in float64 with torch.equal; every rank must call it.

    Raises:
        ValueError: the schedule, the model or the loss do not fit.
    """
    double = InDouble(workload)
    plan = decide(subject_of(double, seed), wishes).plan
    case = _Case(double, plan, steps, seed)
    run = _train(case)
    truths = by_rank_zero(run.transport, lambda: _truths(case))
    truth = truths[run.rank if len(truths) > 1 else 0]
    with run.newest():
        mine = dict(_state(run.model))
    apart = [_apart(mine[name], truth[name]) for name in truth]
    largest = run.transport.agree_largest(apart)
    run.transport.close()
    options = read_options(plan.schedule.options, plan.workers)
    said = f"cyclic, slack {options.slack}, {options.micro_batches} micro-batches, {options.stages} stages"
    if options.clip is not None:
        said += f", clipped at {options.clip.max_norm:g} by {options.clip.by}"
    differences = []
    for name, difference in zip(truth, largest, strict=True):
        verdict: Verdict = "equal" if difference == 0.0 else "differs"
        differences.append(Difference(name, said, options.mode, difference, verdict))
    return Verification(workload.name, plan.workers, steps, 0.0, tuple(differences))


def _train(case: _Case) -> CyclicRun:
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    count = read_options(case.plan.schedule.options, case.plan.workers).micro_batches
    example = next(Feed(case.workload, (0, count), case.seed))
    run = drive(case.plan, model, optimizer, case.workload.loss, example, seed=case.seed)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [case.half], RATE_DROP)
    feeds = [Feed(case.workload, (micro_batch, count), case.seed) for micro_batch in run.micro_batches]
    for step in range(case.steps):
        if step == case.half:
            with run.newest():
                pass
        if step == case.half + 1:
            run.drain()
        run.step([next(feed) for feed in feeds])
        scheduler.step()
    run.drain()
    return run


def _truths(case: _Case) -> list[dict[str, Tensor]]:
    """What every process must hold at the end; one for all but where workers keep buffers of their own."""
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    options = read_options(case.plan.schedule.options, case.plan.workers)
    feeds = [Feed(case.workload, (m, options.micro_batches), case.seed) for m in range(options.micro_batches)]
    example = next(Feed(case.workload, (0, options.micro_batches), case.seed))
    split = SplitLoss(case.workload.loss, model, example)
    stages = [stage.module for stage in stages_of(model, split.input_of(example), options.points)]
    copies = range(options.micro_batches) if options.mode == "ring" else None
    reference = Reference(stages, optimizer, options.schedule(), split.of_output, case.seed, copies, options.clip)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [case.half], RATE_DROP)
    for step in range(case.steps):
        if step == case.half + 1:
            reference.drain()
        batches = [next(feed) for feed in feeds]
        reference.step([(split.input_of(batch), batch) for batch in batches])
        scheduler.step()
    if copies is None:
        return [dict(_state(model))]
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    truths = []
    for own in reference.buffers:
        truth = dict(_state(model))
        for stage, buffers in zip(stages, own, strict=True):
            local = dict(stage.named_buffers())
            truth |= {names[id(local[name])]: buffer for name, buffer in buffers.items() if id(local[name]) in names}
        truths.append(truth)
    return truths


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.detach().clone()


def _apart(found: Tensor, true: Tensor) -> float:
    """Zero only if every bit is equal; else the difference over the true norm, or infinity where that says nothing."""
    if torch.equal(found, true):
        return 0.0
    difference = float((found - true).double().norm()) / (float(true.double().norm()) or 1.0)
    return difference if difference > 0.0 else float("inf")
