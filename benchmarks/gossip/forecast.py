"""What a live training will send and how long it takes, from one process that knows no network."""

from typing import Any, NamedTuple

import torch

import armillary
from armillary.exchanges import build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.session.truth import SeededBatch, seeded_loss
from armillary.session.workload import TrainBatches, stream_seed

__all__ = ["Passes", "sent_by_pass", "took"]


class Passes(NamedTuple):
    """sent_bytes: by pass and rank, to each of both neighbours."""

    sent_bytes: list[list[float]]


def sent_by_pass(workload: Any, choice: str, workers: int, steps: int, seed: int = 0) -> Passes:
    """By the exchange's oracle, over the batches that the job draws."""
    named = armillary.Choice.parse(choice)
    torch.manual_seed(seed)
    model = workload.model()
    names = tuple(name for name, _ in model.named_parameters())
    exchange = build_dense(named.name, **named.options)
    side = Replicas(model, lambda one: workload.optimizer(one.parameters()), workers, [SharedGroup(names, exchange)])
    feeds, layout, found = (
        [TrainBatches(workload, (rank, workers), seed) for rank in range(workers)],
        side.layouts[0],
        [],
    )
    for step in range(steps):
        drawn = [SeededBatch(stream_seed(seed, step, rank), next(feed)) for rank, feed in enumerate(feeds)]
        side.step(drawn, lambda net, one: seeded_loss(workload, net, one))
        sent = [layout.nbytes * exchange.density(layout, state) for state in side.states[0]]
        found.append([len(layout.names) + one for one in sent])
    return Passes(found)


def took(passes: Passes, seconds_per_byte: float) -> float:
    """Of all passes: a rank goes on when its link has carried what it sends and what its neighbours send it.

    Args:
        seconds_per_byte: of what goes to one neighbour, the other's beside it, on a link of that speed.
    """
    ranks = len(passes.sent_bytes[0])
    clock = [0.0] * ranks
    for sent in passes.sent_bytes:
        near = [sorted({(rank - 1) % ranks, rank, (rank + 1) % ranks}) for rank in range(ranks)]
        begun = [max(clock[other] for other in those) for those in near]
        left = [at + bytes_ * seconds_per_byte for at, bytes_ in zip(begun, sent, strict=True)]
        clock = [max(left[other] for other in those) for those in near]
    return max(clock)
