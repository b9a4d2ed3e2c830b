"""Trains a workload without a common clock, replays in one process what the owners logged, and compares every bit.

The learning rate falls half-way, which owners that step at a rate of their own do not survive. Ranks pause for moments
drawn by lot, so that they overtake one another. The logs themselves are looked at for a broken bound.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.plans.plan import Plan
from armillary.plans.update_log import Event, UpdateLog, faults, staleness
from armillary.reference.replay import Replay, replayed
from armillary.schedules.registry import options_of
from armillary.session.attach import attach
from armillary.session.double_precision import is_repeatable
from armillary.session.owners_engine import OwnersLoop
from armillary.session.run import Run
from armillary.session.verification import TOLERANCE, Acted, Difference, Verdict, Verification
from armillary.session.verify_schedule import NOT_REPEATABLE, RATE_DROP, apart
from armillary.session.workload import Batch, TrainBatches, Workload
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify_replay"]

LONGER = 4  # times the steps that are asked for: clocks need some to come apart
LONGEST_PAUSE = 0.01  # seconds
TOLD_STALENESS = 3  # updates that are staler count together


class _Case(NamedTuple):
    workload: Workload
    plan: Plan
    steps: int
    seed: int

    def feed(self, worker: int) -> TrainBatches:
        return TrainBatches(self.workload, (worker, self.plan.workers), self.seed)


def verify_replay(workload: Workload, plan: Plan, steps: int, seed: int, every_bit: bool | None = None) -> Verification:
    """Every rank must call it; see `verify_schedule`."""
    case = _Case(workload, plan, LONGER * steps, seed)
    run, engine = _trained(case)
    logs = engine.logs()
    truth = by_rank_zero(engine.transport, lambda: _replayed(case, engine, logs))
    with engine.newest():
        mine = {name: one.detach().clone() for name, one in engine.model.named_parameters() if name in truth}
    largest = engine.transport.agree_largest([apart(mine[name], one) for name, one in truth.items()])
    is_exact = not any(engine.transport.agree_largest([float(not is_repeatable())])) if every_bit is None else every_bit
    run.close(gather=False)
    tolerance = 0.0 if is_exact else TOLERANCE
    said = f"{plan.schedule}, replayed"
    rows = [Difference(*row) for row in _rows(said, plan, dict(zip(truth, largest, strict=True)), tolerance)]
    bound = options_of(plan).bound
    for owner, log in enumerate(logs):
        broken = faults(log, plan.workers, bound)
        verdict: Verdict = "differs" if broken else "equal"
        what = f"log of owner {owner}" + (f": {broken[0]}" if broken else "")
        rows.append(Difference(what, "logs", "the bound on clocks", float(bool(broken)), verdict, is_trained=False))
    acted = tuple(Acted(said, plan.schedule.name, what, times) for what, times in _acts(logs).items())
    admitted = tuple(one for one in plan.notes if one.startswith("NOT exact: "))
    note = "" if is_exact else NOT_REPEATABLE
    return Verification(
        workload.name, plan.workers, case.steps, tolerance, tuple(rows), note, acted, admitted=admitted,
        nodes=plan.workers // plan.workers_per_node,
    )  # fmt: skip


def _rows(said: str, plan: Plan, found: dict[str, float], tolerance: float) -> Iterator[tuple[Any, ...]]:
    for name, difference in found.items():
        verdict = "equal" if difference <= tolerance else "differs"
        yield name, said, plan.schedule.name, difference, verdict, True


def _acts(logs: Sequence[UpdateLog]) -> dict[str, int]:
    stale = sum((staleness(log) for log in logs), Counter[int]())
    acts = {"pulls that waited for the bound": sum(log.waited for log in logs)}
    acts |= {f"steps of staleness {by}": stale[by] for by in range(TOLD_STALENESS)}
    more = sum(count for by, count in stale.items() if by >= TOLD_STALENESS)
    return acts | {f"steps of staleness {TOLD_STALENESS} or more": more}


def _trained(case: _Case) -> tuple[Run, OwnersLoop]:
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    example = next(case.feed(0))
    run = attach(case.plan, model, optimizer, loss=case.workload.loss, example=example, seed=case.seed)
    engine = run._engine
    assert isinstance(engine, OwnersLoop)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [case.steps // 2], RATE_DROP)
    feed, lot = case.feed(run.rank), random.Random(f"{case.seed} {run.rank}")
    for _ in range(case.steps):
        time.sleep(lot.random() * LONGEST_PAUSE)
        run.step([next(feed)])
        scheduler.step()
    return run, engine


def _replayed(case: _Case, engine: OwnersLoop, logs: Sequence[UpdateLog]) -> dict[str, Tensor]:
    torch.manual_seed(case.seed)
    model = case.workload.model()
    optimizer = case.workload.optimizer(model.parameters())
    batches: list[list[Batch]] = []
    for worker in range(case.plan.workers):
        feed = case.feed(worker)
        batches.append([next(feed) for _ in range(case.steps)])

    def batch_of(event: Event) -> Batch:
        return batches[event.worker][event.step]

    def options_at(worker: int, step: int) -> list[dict[str, Any]]:
        rate = RATE_DROP if step >= case.steps // 2 else 1.0
        return [{**group, "lr": group["lr"] * rate} for group in optimizer.param_groups]

    ownings = engine.part.ownings
    given = Replay(
        model, optimizer, case.workload.loss, ownings.dense, [*ownings.tables], batch_of, options_at, case.seed
    )
    replayed(given, logs)
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
