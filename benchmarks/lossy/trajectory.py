"""The metric of a contender of ours after so many steps: N simulated workers in one process, in lockstep."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

import armillary
from armillary.exchanges import build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.session.truth import SeededBatch, seeded_loss
from armillary.session.twin import Lockstep
from armillary.session.workload import Batch, TrainBatches, Workload, stream_seed
from benchmarks.lossy.contenders import OURS
from benchmarks.lossy.judged import held_out, judged
from benchmarks.lossy.tasks import Task

__all__ = ["Curve", "to_the_end", "trajectory"]


class Curve(NamedTuple):
    """steps: after how many; metric: then. sent_bytes: of a worker and step, by what is coded."""

    steps: list[int]
    metric: list[float]
    sent_bytes: float


def trajectory(name: str, task: Task, workload: Workload, seed: int, looks: Sequence[int], workers: int) -> Curve:
    """looks: the steps after which to look, the last of which ends the training."""
    return _trained(name, task, workload, seed, looks, workers, held_out(workload), lambda step: 1.0)


def to_the_end(name: str, task: Task, workload: Workload, seed: int, steps: int, workers: int) -> Curve:
    """A training as one ends it: the learning rate falls in a line to 0, and all held-out data are looked at."""
    batches = held_out(workload, None)
    return _trained(name, task, workload, seed, [steps], workers, batches, lambda step: 1 - step / steps)


def _trained(
    name: str, task: Task, workload: Workload, seed: int, looks: Sequence[int], workers: int, batches: Sequence[Batch],
    rate_at: Callable[[int], float],
) -> Curve:  # fmt: skip
    """rate_at: of a step, what the learning rate is multiplied by."""
    answer = Lockstep(1)
    torch.manual_seed(seed)
    model = workload.model()
    groups = []
    if OURS[name]:
        choice = armillary.Choice.parse(OURS[name])
        dense = tuple(one for one, _ in model.named_parameters() if one not in task.by_row)
        groups = [SharedGroup(dense, build_dense(choice.name, **choice.options))]
    side = Replicas(model, lambda one: workload.optimizer(one.parameters()), workers, groups, answer)
    feeds = [TrainBatches(workload, (worker, workers), seed) for worker in range(workers)]
    schedules = [LambdaLR(one, rate_at) for one in side.optimizers]
    found = list[float]()
    for step in range(max(looks) + 1):
        if step in looks:
            found.append(judged(workload, side.models[0], batches, task.metric))
        if step < max(looks):
            drawn = [SeededBatch(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
            side.step(drawn, lambda net, one: seeded_loss(workload, net, one))
            for one in schedules:
                one.step()
    return Curve(sorted(looks), found, answer.sent_bytes / max(looks))
