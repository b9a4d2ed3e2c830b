"""What a plan that is not exact would do to a script's own training, for whoever has no workload: `armillary.twin`."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import SIMULTANEOUS, Choice
from armillary.facts.topology import Topology
from armillary.planning.demand import Constraint
from armillary.planning.edges import EdgeRequest
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.runtime.profiling.probe import Loss
from armillary.session.foresight.side_by_side import HELD_OUT, Told, trained
from armillary.session.foresight.twin_page import Twin
from armillary.session.foresight.twin_plans import AskedTraining, planned
from armillary.session.script import Script
from armillary.session.validation import handed_in

__all__ = ["twin"]


def _silent(trained: object) -> None:
    pass


def twin(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    topology: Topology,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    allow: Collection[str] = (),
    schedule: Choice | str = SIMULTANEOUS,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
    steps: int = 300,
    seeds: int = 3,
    told: Told = _silent,
) -> Twin:
    """Trains copies of the model exactly and as a plan that is not exact would, on the same batches: what that does to
    the loss, at equal steps and at equal forecast seconds. In this process, which simulates the workers; model,
    optimizer and random state stay as they were. `print` it, or `.save` it.

    Args:
        batches: at least steps x workers, each one worker's batch of one step, and 8 more, by which both are judged.
            Under a schedule that owns the loop each is a micro-batch, and a step takes those of all workers.
            They are drawn once and kept. Under seed 0 they are taken in their order, under others shuffled; initial
            values are the model's under every seed.
        loss: loss(model, batch) -> scalar tensor, the mean over the batch.
        topology: the machines: measured (`measure`), read (`Topology.load`) or given by hand; its workers are
            simulated. `topology.of(n)` is the same with n workers.
        constraints, allow: as in `plan`. The exact side honours those of them that are exact.
        schedule, edge, edge_back: likewise. Both sides take the schedule, the twin alone codes what crosses its edges.
        told: hears every look at the losses, as it is taken.

    Raises:
        ValueError: too few batches, or something asked that cannot be granted; nothing was trained then.
        RuntimeError: the loss writes into its batch.
    """
    request = PlanRequest(constraints, schedule=named(schedule), allow=allow, edge=edge, edge_back=edge_back)
    asked = AskedTraining(topology, steps, seeds, request)
    asked.refuse()
    wanted = steps * asked.batches
    drawn = list(islice(batches, wanted + HELD_OUT))
    if len(drawn) < wanted + HELD_OUT:
        raise ValueError(
            f"twin: batches gave {len(drawn)}; {steps} steps of {asked.batches} batches, and {HELD_OUT} held out, take "
            f"{wanted + HELD_OUT}; give more, or ask for fewer steps"
        )

    def script(seed: int) -> Script:
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(wanted, generator=draw).tolist() if seed else range(wanted)
        return Script(model, optimizer, [drawn[place] for place in order], loss, steps, "twin")

    first = script(0)
    if complaint := handed_in(model, optimizer):
        raise ValueError(f"twin: {complaint}")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        both = planned(first, asked)
        losses = [trained(script(seed), both, asked, seed, drawn[wanted:], told) for seed in range(seeds)]
    return both.twin(f"{Script.name}: {asked.words()}", asked, losses)
