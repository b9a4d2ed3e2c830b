"""How a plan is held to one process, by each way to take its steps: what is trained on both sides, and compared.

* Behind a loop of the user's own (`verify_hooks`) the one process knows no exchange and no runtime
  (`reference/serial.py`). A plan whose exchanges depart from exact is held to what they say of themselves. It is
  trained until all that its exchanges do was done twice, or for `LONGER` times the steps.
* Under a schedule that owns the loop (`verify_schedule`) the one process runs `loss(model, batch)` of the whole model
  (`reference/whole_model.py`). What has a meaning at the cuts only is compared with loops over stages. They count once
  they did all that the whole model does, which is a row of its own. The learning rate falls half-way, to catch late
  gradients that are applied at the wrong rate. The newest weights are looked at in between, and the run is drained
  once. Where sums have another order (gloo's of three or more workers, tied stages), or a process rounds by address,
  the two are compared to rounding.
* Without a common clock (`verify_replay`) one process replays what the owners logged. The learning rate falls half-way,
  which owners that step at a rate of their own do not survive. Ranks pause for moments drawn by lot, so that they
  overtake one another. The logs themselves are looked at for a broken bound.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from armillary.plans.requests import summed
from armillary.plans.update_log import Event, UpdateLog, faults, staleness
from armillary.reference.replay import Replay, replayed
from armillary.reference.whole_model import Beside, beside_whole
from armillary.schedules.method import ScheduleOptions
from armillary.session.attach import attach
from armillary.session.owners_engine import OwnersLoop
from armillary.session.run import Run
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.stage_setup import cut_model
from armillary.session.truth import (
    ScheduleTruth,
    SeededBatch,
    Truth,
    WholeTruth,
    coded_rows,
    departing,
    departs,
    is_whole,
    note_norms,
    one_process,
    quiet_of,
    replicas,
    seeded_loss,
)
from armillary.session.verification import (
    BESIDE,
    RATE_DROP,
    TOLERANCE,
    Acts,
    Difference,
    Judged,
    TrainedCase,
    Verdict,
    VerifiedCase,
    acts_of,
    edge_acts,
    judged,
    watched,
)
from armillary.session.workload import Batch, TrainBatches, stream_seed
from armillary.stages.partition import ties_of
from armillary.stages.stages import cut_at
from armillary.tables.handle import TableHandle
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify_hooks", "verify_replay", "verify_schedule"]

TWICE = 2
LONGER = 4


def verify_hooks(case: VerifiedCase) -> Judged:
    """Every rank must call it."""
    trained = _train_by_hooks(case)  # what departs is held to an oracle of its own, which the page says
    return replace(judged(case, trained, _truth_of_hooks(case, trained)), admitted=())


def _truth_of_hooks(case: VerifiedCase, trained: TrainedCase) -> Truth:
    transport, steps = trained.run._transport, trained.steps
    if departs(case.plan):
        return by_rank_zero(transport, partial(replicas, case.workload, case.plan, steps, case.seed))
    if steps not in case.truths:
        one, places = (case.workload, case.plan.workers) if case.joined is None else (case.joined, 1)
        case.truths[steps] = by_rank_zero(transport, partial(one_process, one, places, steps, case.seed))
    return case.truths[steps]


def _train_by_hooks(case: VerifiedCase) -> TrainedCase:
    """For so many steps; longer while something happened less than twice and there are steps to take."""
    model, optimizer = case.begun()
    run = attach(case.plan, model, optimizer, check_order=True)
    mine, acts, taken = watched(run), Acts(), 0
    most = max(case.steps, min(LONGER * case.steps, case.workload.steps))
    for step, batch in enumerate(islice(case.feed(run.rank), most)):
        optimizer.zero_grad(set_to_none=True)
        seeded_loss(case.workload, model, SeededBatch(stream_seed(case.seed, step, run.rank), batch)).backward()
        optimizer.step()
        taken = step + 1
        if taken >= case.steps:
            acts = acts_of(run._transport.share(mine))
            if min(acts.values(), default=TWICE) >= TWICE:
                break
    run._engine.finish()
    whole, plan = dict(_whole(run)), case.plan
    ways = {name: str(group.exchange) for group in plan.groups for name in group.parameters}
    others = {name for group in plan.groups if group.departures for name in group.parameters} if departs(plan) else ()
    held = {name: whole[name] for name in plan.parameters}
    return TrainedCase(run, taken, held, acts, ways, frozenset(others), is_in_order=False)


def _whole(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as this rank sees it, by plain look-ups where it is owned by rows. What a look-up codes, its
    owners tell: it is the rows themselves that are compared."""
    coded = coded_rows(run.plan)
    with torch.no_grad():
        for name, parameter in run._model.named_parameters():
            if not isinstance(parameter, TableHandle):
                yield name, parameter.detach()
            elif name in coded:
                yield name, _told(run, name)
            else:
                yield name, parameter[torch.arange(len(parameter))]


def _told(run: Run, name: str) -> Tensor:
    """Collective: a whole table, each row as its owner has it."""
    table = run._engine.tables[name]
    whole = table.shard.new_zeros(table.shape)
    whole[table.ownership.ids(table.place.rank, torch.arange(len(table.shard)))] = table.rows
    total: Tensor = run._transport.complete(summed(whole), name)
    return total


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
    trained = _train_by_schedule(case, is_held_whole and any(beside.differences.values()))
    truth = by_rank_zero(trained.run._transport, lambda: _truth_of_schedule(case, is_held_whole))
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


def _train_by_schedule(case: VerifiedCase, rounds_otherwise: bool) -> TrainedCase:
    """rounds_otherwise: stages make other bits than the whole model that they are held to."""
    model, optimizer = case.begun()
    rates = case.rates(optimizer)
    example = next(TrainBatches(case.workload, (0, case.micro_batches), case.seed))
    run = attach(case.plan, model, optimizer, loss=case.workload.loss, example=example, seed=case.seed)
    engine = run._engine
    if not isinstance(engine, OwnedLoop):
        driver = case.options.method.step_mode
        raise ValueError(
            f"verify: driver {driver!r} makes an engine of its own, which nobody knows how to verify; register a way: "
            f"VERIFIERS.register({driver!r}, ...) of armillary.session.verify"
        )
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


def _truth_of_schedule(case: VerifiedCase, is_held_whole: bool) -> Truth:
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


REPLAYED_STEPS = 4  # times the steps that are asked for: clocks need some to come apart
LONGEST_PAUSE = 0.01  # seconds
TOLD_STALENESS = 3  # updates that are staler count together


def verify_replay(asked: VerifiedCase) -> Judged:
    """Every rank must call it."""
    case = replace(asked, steps=REPLAYED_STEPS * asked.steps, label=f"{asked.plan.schedule}, replayed")
    trained, logs = _train_by_owners(case)
    engine = trained.run._engine
    assert isinstance(engine, OwnersLoop)
    truth = by_rank_zero(engine.transport, lambda: _replayed(case, engine, logs))
    found, bound, rows = judged(case, trained, truth), case.options.bound, list[Difference]()
    for owner, log in enumerate(logs):
        broken = faults(log, case.plan.workers, bound)
        verdict: Verdict = "differs" if broken else "equal"
        what = f"log of owner {owner}" + (f": {broken[0]}" if broken else "")
        rows.append(Difference(what, "logs", "the bound on clocks", float(bool(broken)), verdict, is_trained=False))
    return replace(found, differences=(*found.differences, *rows))


def _acts(logs: Sequence[UpdateLog]) -> dict[str, int]:
    stale = sum((staleness(log) for log in logs), Counter[int]())
    acts = {"pulls that waited for the bound": sum(log.waited for log in logs)}
    acts |= {f"steps of staleness {by}": stale[by] for by in range(TOLD_STALENESS)}
    more = sum(count for by, count in stale.items() if by >= TOLD_STALENESS)
    return acts | {f"steps of staleness {TOLD_STALENESS} or more": more}


def _train_by_owners(case: VerifiedCase) -> tuple[TrainedCase, Sequence[UpdateLog]]:
    model, optimizer = case.begun()
    rates = case.rates(optimizer)
    example = next(case.feed(0))
    run = attach(case.plan, model, optimizer, loss=case.workload.loss, example=example, seed=case.seed)
    engine = run._engine
    assert isinstance(engine, OwnersLoop)
    feed, lot = case.feed(run.rank), random.Random(f"{case.seed} {run.rank}")
    for _ in range(case.steps):
        time.sleep(lot.random() * LONGEST_PAUSE)
        run.step([next(feed)])
        rates.step()
    logs = engine.logs()
    with engine.newest():
        mine = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    acts = Acts({(case.plan.schedule.name, what): times for what, times in _acts(logs).items()})
    return TrainedCase(run, case.steps, mine, acts, {}, frozenset(), is_in_order=True), logs


def _replayed(case: VerifiedCase, engine: OwnersLoop, logs: Sequence[UpdateLog]) -> Truth:
    model, optimizer = case.begun()
    batches: list[list[Batch]] = []
    for worker in range(case.plan.workers):
        feed = case.feed(worker)
        batches.append([next(feed) for _ in range(case.steps)])

    def batch_of(event: Event) -> Batch:
        return batches[event.worker][event.step]

    def options_at(worker: int, step: int) -> list[dict[str, Any]]:
        rate = RATE_DROP if step >= case.half else 1.0
        return [{**group, "lr": group["lr"] * rate} for group in optimizer.param_groups]

    ownings = engine.part.ownings
    given = Replay(
        model, optimizer, case.workload.loss, ownings.dense, [*ownings.tables], batch_of, options_at, case.seed
    )
    replayed(given, logs)
    values = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
    return Truth((values,), frozenset())
