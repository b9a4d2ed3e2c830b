"""Trains a workload without a common clock, replays in one process what the owners logged, and compares every bit.

The learning rate falls half-way, which owners that step at a rate of their own do not survive. Ranks pause for moments
drawn by lot, so that they overtake one another. The logs themselves are looked at for a broken bound.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from armillary.plans.update_log import Event, UpdateLog, faults, staleness
from armillary.reference.replay import Replay, replayed
from armillary.session.attach import attach
from armillary.session.judged import RATE_DROP, Judged, TrainedCase, VerifiedCase, judged
from armillary.session.owners_engine import OwnersLoop
from armillary.session.truth import Truth
from armillary.session.verification import Acts, Difference, Verdict
from armillary.session.workload import Batch
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify_replay"]

LONGER = 4  # times the steps that are asked for: clocks need some to come apart
LONGEST_PAUSE = 0.01  # seconds
TOLD_STALENESS = 3  # updates that are staler count together


def verify_replay(asked: VerifiedCase) -> Judged:
    """Every rank must call it."""
    case = replace(asked, steps=LONGER * asked.steps, label=f"{asked.plan.schedule}, replayed")
    trained, logs = _train(case)
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


def _train(case: VerifiedCase) -> tuple[TrainedCase, Sequence[UpdateLog]]:
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
