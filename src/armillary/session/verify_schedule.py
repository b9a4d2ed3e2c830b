"""Trains a workload under a schedule that owns the loop and in one process, and compares every bit.

The one process runs `loss(model, batch)` of the whole model (`reference/whole_model.py`). What has a meaning at the
cuts only is compared with loops over stages. They count once they did all that the whole model does, which is a row of
its own.

The learning rate falls half-way, to catch late gradients that are applied at the wrong rate. The newest weights are
looked at in between, and the run is drained once. Where sums have another order (gloo's of three or more workers, tied
stages), or a process rounds by address, the two are compared to rounding.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.reference.whole_model import Beside, beside_whole
from armillary.schedules.method import ScheduleOptions
from armillary.session.attach import attach
from armillary.session.judged import Judged, TrainedCase, VerifiedCase, judged
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.stage_setup import cut_model
from armillary.session.truth import ScheduleTruth, Truth, WholeTruth, departing, is_whole, note_norms, quiet_of
from armillary.session.verification import BESIDE, TOLERANCE, Difference, Verdict, acts_of, edge_acts, watched
from armillary.session.workload import TrainBatches
from armillary.stages.partition import ties_of
from armillary.stages.stages import cut_at
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify_schedule"]

MOST_BESIDE = 4  # micro-batches


def verify_schedule(case: VerifiedCase) -> Judged:
    """Every rank must call it.

    Raises:
        ValueError: the schedule, the model or the loss do not fit.
    """
    case = replace(case, label=_said(case.options))
    beside = _beside(case)
    rows = tuple(_rows_beside(beside))
    if any(one.verdict == "differs" for one in rows):
        return Judged(rows, note=f"{beside.said}; nothing was trained" if beside.said else "nothing was trained")
    is_held_whole = is_whole(case.plan, beside.draws)
    trained = _train(case, is_held_whole and any(beside.differences.values()))
    truth = by_rank_zero(trained.run._transport, lambda: _truth(case, is_held_whole))
    found = judged(case, trained, truth)
    return replace(found, differences=(*rows, *found.differences))


def _beside(case: VerifiedCase) -> Beside:
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


def _train(case: VerifiedCase, rounds_otherwise: bool) -> TrainedCase:
    """rounds_otherwise: stages make other bits than the whole model that they are held to."""
    model, optimizer = case.begun()
    rates = case.rates(optimizer)
    example = next(TrainBatches(case.workload, (0, case.micro_batches), case.seed))
    run = attach(case.plan, model, optimizer, loss=case.workload.loss, example=example, seed=case.seed)
    engine = run._engine
    assert isinstance(engine, OwnedLoop)
    acts = watched(run)
    feeds = [case.feed(micro_batch) for micro_batch in engine.micro_batches]
    for step in range(case.steps):
        if step == case.half:
            with engine.newest():
                pass
        if step == case.half + 1:
            engine.drain()
        run.step([next(feed) for feed in feeds])
        rates.step()
    engine.drain()
    acts.update(edge_acts(run))
    with engine.newest():
        mine = dict(_state(engine.model))
    lossy = {name: str(choice) for group, choice in departing(case.plan) for name in group.parameters}
    is_in_order = _is_summed_in_order(engine) and not rounds_otherwise
    everyones = acts_of(engine.transport.share(acts))
    return TrainedCase(run, case.steps, mine, everyones, lossy, frozenset(lossy), is_in_order)


def _truth(case: VerifiedCase, is_held_whole: bool) -> Truth:
    """What every process must hold at the end: one for all, but where workers keep buffers of their own."""
    model, optimizer = case.begun()
    rates = case.rates(optimizer)
    feeds = [case.feed(micro_batch) for micro_batch in range(case.micro_batches)]
    truth: WholeTruth | ScheduleTruth = WholeTruth(case.plan, model, optimizer, case.workload.loss)
    if not is_held_whole:
        example = next(TrainBatches(case.workload, (0, case.micro_batches), case.seed))
        cut = cut_model(case.workload.loss, model, example, case.options)
        truth = ScheduleTruth(case.plan, model, optimizer, cut, case.seed)
    norms: dict[str, float] = {}
    optimizer.register_step_pre_hook(lambda *_: note_norms(model, norms))
    for step in range(case.steps):
        if step == case.half + 1:
            truth.drain()
        truth.step([next(feed) for feed in feeds])
        rates.step()
    own = truth.own_buffers()
    states = [dict(_state(model)) | buffers for buffers in (own if len(own) == case.plan.workers else [*own, {}][:1])]
    return Truth(tuple(states), quiet_of(norms, model))


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.detach().clone()
