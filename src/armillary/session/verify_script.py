"""Whether a script's own model trains on many workers as in one process: `verify` for whoever has no workload."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import SIMULTANEOUS, Choice, Plan
from armillary.planning.demand import Constraint
from armillary.planning.edges import EdgeRequest
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.planning.rule import PRICE
from armillary.runtime.profiling.probe import Loss
from armillary.session.decide import JobRequest, open_transport
from armillary.session.first_batches import alike_ranks
from armillary.session.script import Script
from armillary.session.source import leaves
from armillary.session.verification import Verification
from armillary.session.verify import verify_workload

__all__ = ["verify"]


def verify(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    plan: Plan | None = None,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    schedule: Choice | str = SIMULTANEOUS,
    rule: str = PRICE,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
    steps: int = 5,
    seed: int = 0,
    exchanges: Sequence[str] | Literal["every"] = "every",
) -> Verification:
    """Trains copies of the model on all workers and in one process, in float64, and compares every parameter. Every
    rank must call it; model and optimizer stay as they were. `print` it; `.is_equal` is the answer. What a loop does
    besides (clipping, schedulers, accumulation) is not tried.

    Args:
        batches: the same on every rank, as many as steps x workers; each is one worker's batch of one step.
        loss: loss(model, batch) -> scalar tensor, the mean over the batch.
        plan: to be held to the truth; without, one is made as in `auto_plan` (`constraints`, `lazy`,
            `schedule`, `rule`, `edge`, `edge_back`).
        exchanges: to be forced besides, one after the other; () for none.

    Raises:
        ValueError: too few batches, ranks with other batches, or a plan or something asked that does not fit.
    """
    if plan is not None and (edge or edge_back):
        raise ValueError("plan: a plan that is given says its own edges; edit its stages, or drop edge and edge_back")
    script = Script(model, optimizer, batches, loss, steps)
    transport = open_transport()
    workers = transport.place.workers
    first = list(islice(script.batches("train", 0, 1, seed), 1))
    alike = alike_ranks(first, transport)
    transport.close()
    if workers > 1 and leaves(first) and alike != [tuple(range(workers))]:
        raise ValueError(
            "verify: ranks draw other batches than rank 0; give every rank the same, unshuffled or "
            "shuffled by one seed: verify itself takes each worker's share"
        )
    next(script.batches("train", steps * workers - 1, workers, seed))  # the last: too few are told of on every rank
    request = PlanRequest(constraints, lazy, schedule=named(schedule), rule=rule, edge=edge, edge_back=edge_back)
    return verify_workload(script, steps=steps, seed=seed, request=JobRequest(request, plan), exchanges=exchanges)
