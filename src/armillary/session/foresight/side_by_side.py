"""Trains one model twice on the same batches in this process: exactly, and as a plan that is not exact would.

The workers are simulated. Exchanges that depart run the programs that ranks would run, in lockstep, so their bytes are
counted. Rows that travel in code are encoded and decoded, as ranks would. What is exact is averaged exactly, on both
sides by the same sums. Under a schedule that owns the loop both sides are that schedule's truth. So two exact plans
come out alike bit for bit, and a gap in the loss is the doing of what is coded.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.parcel import Parcel, State
from armillary.exchanges.rank_info import RankInfo
from armillary.reference import lockstep
from armillary.reference.replicas import Replicas
from armillary.session.evaluate import evaluating
from armillary.session.feed import Feed, stream_seed
from armillary.session.foresight.gap import knots
from armillary.session.foresight.trainee import Trainee, of_replicas, under_schedule
from armillary.session.foresight.twin_plans import AskedTraining, Both, Losses
from armillary.session.source import leaves
from armillary.session.truths import SeededBatch, seeded_loss
from armillary.session.workload import Batch, Workload

__all__ = ["HELD_OUT", "Lockstep", "Told", "Trained", "trained"]

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
        pair = (
            Replicas(model, optimizer, workers, ()),
            Replicas(model, optimizer, workers, both.departing, answer, both.rows, asked.topology.workers_per_node),
        )
        sides = [of_replicas(workload, one) for one in pair]
    feeds = [Feed(workload, (number, asked.batches), seed) for number in range(asked.batches)]
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
    return Losses(tuple(losses[0]), tuple(losses[1]), answer.sent_bytes / asked.steps)


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
