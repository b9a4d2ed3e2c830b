"""What a plan that is not exact would do to a script's own training: `armillary.twin`.

Trains one model twice on the same batches in this process, exactly and as the other plan would. The workers are
simulated. Exchanges that depart run the programs that ranks would run, in lockstep, so their bytes are counted. Coded
rows are encoded and decoded, coded edges are what their codecs mean inside one graph. What is exact is averaged by the
same sums on both sides, so two exact plans come out alike bit for bit. Under a schedule that owns the loop both sides
are that schedule's truth.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.averaged_gradients import averaging
from armillary.exchanges.dense import DenseExchange
from armillary.planning.demand import Constraint
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.planning.stage_costs import EdgeRequest
from armillary.plans.parcel import Parcel, RankInfo, State
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.prefetch.batches import leaves
from armillary.profiler.probe import Loss
from armillary.reference import lockstep
from armillary.reference.replicas import Replicas
from armillary.schedules.registry import options_of
from armillary.session.ema import coded_leaves, edges_at_eval, evaluating
from armillary.session.parallelize import unmoved
from armillary.session.stage_setup import cut_model
from armillary.session.truth import ScheduleTruth, SeededBatch, seeded_loss
from armillary.session.twin_page import Twin, knots
from armillary.session.twin_plans import AskedTraining, Both, Losses, planned
from armillary.session.validation import handed_in
from armillary.session.workload import Batch, Script, TrainBatches, Workload, stream_seed

__all__ = ["HELD_OUT", "Lockstep", "Told", "Trained", "Trainee", "of_replicas", "trained", "twin", "under_schedule"]


class Trainee(NamedTuple):
    """step: one training step, on its batches in their order. shown: gives a model to evaluate, as it is by now.
    complaint: why the training may not say what was asked; empty if it does."""

    step: Callable[[Sequence[SeededBatch]], object]
    shown: Callable[[], AbstractContextManager[nn.Module]]
    complaint: Callable[[], str] = str


def of_replicas(workload: Workload, replicas: Replicas) -> Trainee:
    """Where workers' weights differ, their mean is shown."""

    def loss(model: nn.Module, batch: SeededBatch) -> Tensor:
        return seeded_loss(workload, model, batch)

    @contextmanager
    def shown() -> Iterator[nn.Module]:
        model = replicas.models[0]
        if any(other is not model for other in replicas.models):
            model = copy.deepcopy(model)
            with torch.no_grad():
                for name, value in replicas.consensus().items():
                    model.get_parameter(name).copy_(value)
                for name, value in replicas.buffers().items():
                    model.get_buffer(name).copy_(value)
        yield model

    return Trainee(lambda batches: replicas.step(batches, loss), shown)


def under_schedule(
    workload: Workload, plan: Plan, model: nn.Module, optimizer: Callable[[nn.Module], Optimizer], seed: int
) -> Trainee:
    """
    Args:
        model: with the values that training begins with; it is copied.

    Raises:
        ValueError: the model or the loss cannot be cut as the plan says.
    """
    mine, options = copy.deepcopy(model), options_of(plan)
    example = next(TrainBatches(workload, (0, options.total(plan.workers)), seed))
    cut = cut_model(workload.loss, mine, example, options)
    coded = coded_leaves(mine, plan, cut.input_of(example)) if options.method.is_cut else ()
    truth = ScheduleTruth(plan, mine, optimizer(mine), cut, seed)
    steps = 0

    def step(batches: Sequence[SeededBatch]) -> None:
        nonlocal steps
        truth.step([batch for _, batch in batches])
        steps += 1

    @contextmanager
    def shown() -> Iterator[nn.Module]:
        judged = copy.deepcopy(mine)
        with torch.no_grad():
            for name, buffer in next(iter(truth.own_buffers()), {}).items():
                judged.get_buffer(name).copy_(buffer)
        with edges_at_eval(judged, plan, steps, coded):
            yield judged

    def complaint() -> str:
        crossed = truth.edges.samples
        if not crossed["whole"] or crossed["change"]:
            return ""
        return (
            f"none of {crossed['whole']} samples came a second time to an edge that remembers them, so all crossed "
            "whole, and the forecast has their changes; train for more than an epoch, on samples that stay as they are"
        )

    return Trainee(step, shown, complaint)


HELD_OUT = 8  # batches by which both are judged


class Trained(NamedTuple):
    """So many steps of both sides are done under a seed, counted from 0; their held-out losses then."""

    seed: int
    steps: int
    exact: float
    other: float


Told = Callable[[Trained], object]


def trained(
    workload: Workload, both: Both, asked: AskedTraining, seed: int, held_out: Sequence[Batch], told: Told
) -> Losses:
    """The losses of both sides under one seed.

    Args:
        held_out: batches by which they are judged, the same under every seed. told: hears every look at these.

    Raises:
        RuntimeError: the workload's loss writes into its batch, which both sides take.
    """
    workers, answer = asked.topology.workers, Lockstep(asked.topology.workers_per_node)
    torch.manual_seed(seed)
    model = workload.model()

    def optimizer(mine: nn.Module) -> Optimizer:
        return workload.optimizer(mine.parameters())

    if both.plans:
        sides = [under_schedule(workload, plan, model, optimizer, seed) for plan in both.plans]
    else:
        exact = Replicas(model, optimizer, workers, ())
        departing = Replicas(
            model, optimizer, workers, both.departing, answer, both.rows, asked.topology.workers_per_node
        )
        sides = [of_replicas(workload, exact), of_replicas(workload, departing)]
    feeds = [TrainBatches(workload, (number, asked.batches), seed) for number in range(asked.batches)]
    losses: tuple[list[float], list[float]] = ([], [])
    looks = set(knots(asked.steps))
    for step in range(asked.steps + 1):
        if step in looks:
            for side, found in zip(sides, losses, strict=True):
                found.append(_judged(workload, side, held_out))
            told(Trained(seed, step, losses[0][-1], losses[1][-1]))
        if step == asked.steps:
            break
        batches = [SeededBatch(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
        versions = _versions(batches)
        for side in sides:
            side.step(batches)
        if versions != _versions(batches):
            raise RuntimeError(
                f"twin: the loss of {workload.name} writes into its batch, which both sides take; let it clone it first"
            )
    for complaint in filter(None, (side.complaint() for side in sides)):
        warnings.warn(f"twin: {complaint}", stacklevel=2)
    beside = 0.0 if both.plans else _averaged_bytes(departing, asked)
    return Losses(tuple(losses[0]), tuple(losses[1]), (answer.sent_bytes + beside) / asked.steps)


def _averaged_bytes(replicas: Replicas, asked: AskedTraining) -> float:
    """Sent by a rank in all steps, in the mean over ranks, for gradients that are averaged beside weights that meet: no
    data decide that."""
    sent = 0.0
    for group, layout in zip(replicas.groups, replicas.layouts, strict=True):
        for one in group.exchange.gradients:
            steps = sum(one.due(step + 1) for step in range(asked.steps))
            sent += steps * fmean(averaging(one).sent_bytes(layout, asked.topology))
    return sent


def _judged(workload: Workload, side: Trainee, held_out: Sequence[Batch]) -> float:
    """The mean loss of what evaluation would show."""
    with side.shown() as shown, evaluating(shown), torch.no_grad():
        seeded = [SeededBatch(place, batch) for place, batch in enumerate(held_out)]
        losses = [float(seeded_loss(workload, shown, one)) for one in seeded]
    return sum(losses) / len(losses)


class Lockstep:
    """Answers with the programs that ranks would run. sent_bytes: what a rank sent so far, mean over ranks."""

    def __init__(self, workers_per_node: int) -> None:
        self.workers_per_node, self.sent_bytes = workers_per_node, 0.0

    def __call__(
        self, exchange: DenseExchange, parcels: Sequence[Parcel], states: Sequence[State]
    ) -> tuple[list[Parcel], list[State]]:
        places = [RankInfo(rank, len(parcels), self.workers_per_node) for rank in range(len(parcels))]
        programs = [exchange.push(*each) for each in zip(parcels, states, places, strict=True)]
        moved, sent = lockstep.run(programs, self.workers_per_node)
        self.sent_bytes += sum(sent) / len(sent)
        return [result for result, _ in moved], [state for _, state in moved]


def _versions(batches: Sequence[SeededBatch]) -> list[int]:
    return [leaf._version for leaf in leaves([batch for _, batch in batches]) if not leaf.is_inference()]


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
    with unmoved(batches):
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
    with unmoved():
        both = planned(first, asked)
        losses = [trained(script(seed), both, asked, seed, drawn[wanted:], told) for seed in range(seeds)]
    return both.twin(f"{Script.name}: {asked.words()}", asked, losses)
