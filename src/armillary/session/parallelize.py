"""The short way: measure, profile, plan and attach in one call, for a script that has its own loop; its parts, and the
choice among plans by timing them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Choice, Mean, Plan
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.look_ahead import looking_ahead
from armillary.runtime.measure import measure as measure_links
from armillary.runtime.watch.probe import Loss
from armillary.session import trials
from armillary.session.attach import attach
from armillary.session.decide import Subject, Wishes, open_transport
from armillary.session.decide import decide as measured_and_planned
from armillary.session.events import Decided
from armillary.session.run import Run

__all__ = ["Asked", "decide", "fastest", "measure", "parallelize"]


class Asked(TypedDict, total=False):
    """Of the plan to make, as keyword arguments; what they mean stands in `plan`."""

    constraints: Mapping[str, Constraint]
    lazy: Sequence[str]
    mean: Mean
    schedule: Choice


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
    look_ahead: bool = False,
    **asked: Unpack[Asked],
) -> Run:
    """Plans for this job and attaches the plan; the training loop stays as it was. Every rank must call it.

    Nothing is timed. For more, take the steps one by one: `decide`, `looking_ahead`, `fastest`, `attach`.

    Args:
        batches, loss, asked: as in `decide`.
        look_ahead: plan for a loop over `run.batches`, which is then some batches ahead of the training. The same
            training, bit for bit. Without, the plan's notes say what it would bring.

    Raises:
        ValueError: too few batches, a constraint that cannot be honoured, or a model or optimizer that does not fit.
    """
    decided = decide(model, optimizer, batches, loss, **asked)
    plan = looking_ahead(decided.plan, decided.profile, decided.topology) if look_ahead else decided.plan
    return attach(plan, model, optimizer, topology=decided.topology)


def decide(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss, **asked: Unpack[Asked]
) -> Decided:
    """Measures this job, profiles the model and plans: `.topology`, `.profile` and `.plan`, the same on every rank, as
    `attach`, `drive`, `looking_ahead`, `fastest` and `replan` want them. Model and optimizer stay as they were. Every
    rank must call it. (What ranks measure and profile each for themselves differs, and so would their plans.)

    Args:
        batches: a few, at least one per worker, as one worker sees them; rank 0's are looked at, none is trained on.
        loss: loss(model, batch) -> scalar tensor.
        asked: constraints, lazy, mean, schedule, as in `plan`; mean "weights": the loop declares them (`run.weigh`).

    Raises:
        ValueError: too few batches, or a constraint or schedule that cannot be honoured.
    """
    few = list(batches)
    return measured_and_planned(Subject(model, optimizer, loss, lambda _: few), Wishes(**asked))


def fastest(
    plans: Mapping[str, Plan],
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    topology: Topology | None = None,
) -> Plan:
    """The plan whose steps are the shortest in this job, timed on copies of the model for a dozen steps each; its notes
    hold the figures. Every rank must call it, before `attach`; model and optimizer stay as they were.

    ahead = looking_ahead(decided.plan, decided.profile, decided.topology)
    plans = {"plain": decided.plan, "ahead": ahead}
    plan = fastest(plans, model, optimizer, batches, loss, topology=decided.topology)

    Args:
        plans: by name. Those that look ahead are timed in a loop over `run.batches`, the others in a plain one.
        batches: a few of this rank, two at least: trained on by turns, on the copies.
        loss: loss(model, batch) -> scalar tensor.
        topology: as in `attach`; give both the same.

    Raises:
        ValueError: there is no plan, a rank has no batch, or a plan does not fit.
    """
    if not plans:
        raise ValueError("fastest: no plan to choose from; give one or more, by name")
    transport = open_transport()
    chosen = trials.fastest(plans, model, optimizer, loss, list(batches), transport, topology)
    transport.close()
    return chosen
