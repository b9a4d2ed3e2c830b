"""The short way: measure, profile, plan and attach in one call, for a script that has its own loop."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Mean
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.planner import NO_CONSTRAINTS
from armillary.runtime.measure import measure as measure_links
from armillary.runtime.watch.probe import Loss
from armillary.session.attach import attach
from armillary.session.decide import Subject, Wishes, decide, open_transport
from armillary.session.run import Run

__all__ = ["measure", "parallelize"]


def measure() -> Topology:
    """What this job runs on: nodes, links, memory. Takes a second or two; every rank must call it."""
    transport = open_transport()
    topology = measure_links(transport)
    transport.close()
    return topology


def parallelize(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Iterable[str] = (),
    mean: Mean = "workers",
) -> Run:
    """Plans for this job and attaches the plan; the training loop stays as it was. Every rank must call it.

    Args:
        batches: a few, at least one per worker, as one worker sees them; rank 0's are looked at, none is trained on.
        loss: loss(model, batch) -> scalar tensor.
        constraints, lazy, mean: as in `plan`; "weights" means that the loop declares them (`run.weigh`).

    Raises:
        ValueError: too few batches, a constraint that cannot be honoured, or a model or optimizer that does not fit.
    """
    few = list(batches)
    decided = decide(Subject(model, optimizer, loss, lambda _: few), Wishes(constraints, tuple(lazy), mean=mean))
    return attach(decided.plan, model, optimizer)
