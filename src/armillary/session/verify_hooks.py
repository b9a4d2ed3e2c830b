"""A plan behind a loop of the user's own, held to plain PyTorch in one process over the same batches.

The one process knows no exchange and no runtime (`reference/serial.py`). A plan whose exchanges depart from exact is
held to what they say of themselves. It is trained until all that its exchanges do was done twice, or for `LONGER` times
the steps.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from armillary.plans.requests import summed
from armillary.session.attach import attach
from armillary.session.judged import Judged, TrainedCase, VerifiedCase, judged
from armillary.session.run import Run
from armillary.session.truth import SeededBatch, Truth, coded_rows, departs, one_process, replicas, seeded_loss
from armillary.session.verification import Acts, acts_of, watched
from armillary.session.workload import stream_seed
from armillary.tables.handle import TableHandle
from armillary.transport.agreement import by_rank_zero

__all__ = ["verify_hooks"]

TWICE = 2
LONGER = 4


def verify_hooks(case: VerifiedCase) -> Judged:
    """Every rank must call it."""
    trained = _train(case)  # what departs is held to an oracle of its own, which the page says
    return replace(judged(case, trained, _truth(case, trained)), admitted=())


def _truth(case: VerifiedCase, trained: TrainedCase) -> Truth:
    transport, steps = trained.run._transport, trained.steps
    if departs(case.plan):
        return by_rank_zero(transport, partial(replicas, case.workload, case.plan, steps, case.seed))
    if steps not in case.truths:
        one, places = (case.workload, case.plan.workers) if case.joined is None else (case.joined, 1)
        case.truths[steps] = by_rank_zero(transport, partial(one_process, one, places, steps, case.seed))
    return case.truths[steps]


def _train(case: VerifiedCase) -> TrainedCase:
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
