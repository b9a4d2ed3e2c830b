"""The short way: measure, profile, plan and attach in one call, for a script that has its own loop; and the choice
among plans by timing them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Mean, Plan
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.planner import NO_CONSTRAINTS
from armillary.runtime.measure import measure as measure_links
from armillary.runtime.watch.probe import Loss
from armillary.session import trials
from armillary.session.attach import attach
from armillary.session.decide import Subject, Wishes, decide, open_transport
from armillary.session.run import Run

__all__ = ["fastest", "measure", "parallelize"]


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

    Nothing is timed, and the plan does not look ahead; its notes say what that would bring. For more, take the steps
    one by one: `profile`, `measure`, `plan`, `looking_ahead`, `fastest`, `attach`.

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


def fastest(
    plans: Mapping[str, Plan], model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss
) -> Plan:
    """The plan whose steps are the shortest in this job, timed on copies of the model for a dozen steps each; its notes
    hold the figures. Every rank must call it, before `attach`; model and optimizer stay as they were.

    ahead = looking_ahead(plan, profile, topology)
    plan = fastest({"plain": plan, "ahead": ahead}, model, optimizer, batches, loss)

    Args:
        plans: by name. Those that look ahead are timed in a loop over `run.batches`, the others in a plain one.
        batches: a few of this rank, two at least: trained on by turns, on the copies.
        loss: loss(model, batch) -> scalar tensor.

    Raises:
        ValueError: there is no plan, a rank has no batch, or a plan does not fit.
    """
    if not plans:
        raise ValueError("fastest: no plan to choose from; give one or more, by name")
    transport = open_transport()
    chosen = trials.fastest(plans, model, optimizer, loss, list(batches), transport)
    transport.close()
    return chosen
