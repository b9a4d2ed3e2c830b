"""The metric of a contender of ours after so many steps: N simulated workers in one process, in lockstep."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import armillary
from armillary.exchanges.exchange import build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.session.feed import Feed, stream_seed
from armillary.session.foresight.side_by_side import Lockstep
from armillary.session.truths import SeededBatch, seeded_loss
from armillary.session.workload import Workload
from benchmarks.lossy.contenders import OURS
from benchmarks.lossy.judged import held_out, judged
from benchmarks.lossy.tasks import Task

__all__ = ["Curve", "trajectory"]


class Curve(NamedTuple):
    """steps: after how many; metric: then. sent_bytes: of a worker and step, by what is coded."""

    steps: list[int]
    metric: list[float]
    sent_bytes: float


def trajectory(name: str, task: Task, workload: Workload, seed: int, looks: Sequence[int], workers: int) -> Curve:
    """looks: the steps after which to look, the last of which ends the training."""
    answer = Lockstep(1)
    torch.manual_seed(seed)
    model = workload.model()
    groups = []
    if OURS[name]:
        choice = armillary.Choice.parse(OURS[name])
        dense = tuple(one for one, _ in model.named_parameters() if one not in task.by_row)
        groups = [SharedGroup(dense, build_dense(choice.name, **choice.options))]
    side = Replicas(model, lambda one: workload.optimizer(one.parameters()), workers, groups, answer)
    feeds = [Feed(workload, (worker, workers), seed) for worker in range(workers)]
    batches, found = held_out(workload), list[float]()
    for step in range(max(looks) + 1):
        if step in looks:
            found.append(judged(workload, side.models[0], batches, task.metric))
        if step < max(looks):
            drawn = [SeededBatch(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
            side.step(drawn, lambda net, one: seeded_loss(workload, net, one))
    return Curve(sorted(looks), found, answer.sent_bytes / max(looks))
