"""The sides of the race: torch's DistributedDataParallel over sparse gradients, and plans of ours.

All begin from the same values, see the same batches and step by the same optimizer; only the exchange differs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from armillary import Plan, Run, Topology, attach
from armillary.session.workload import TrainBatches, Workload
from benchmarks.parallax.tasks import Task
from benchmarks.peers.sparse import PLAIN_NAMES

__all__ = ["SEED", "Side", "ddp_sparse", "ours", "start"]

SEED = 0


@dataclass(frozen=True)
class Side:
    """step: one batch of this rank and one update; returns the loss before it. plain: collective; on rank 0 the values
    of the workload's own model, by their names in it."""

    step: Callable[[], float]
    plain: Callable[[], Mapping[str, Tensor]]


def start(workload: Workload) -> nn.Module:
    """The same model for every side and on every rank."""
    torch.manual_seed(SEED)
    return workload.model()


def ddp_sparse(workload: Workload, task: Task, bucket_mib: float) -> Side:
    """A table's gradients are gathered as rows, each worker's merged first; the rest is all-reduced in buckets.

    `init_sync=False` leaves out a broadcast at the start only: all ranks begin alike by their seed.
    """
    model = task.sparse(start(workload))
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, init_sync=False)
    step = partial(_train, workload, parallel, task.optimizer(parallel.parameters()), _batches(workload))
    return Side(step, lambda: {PLAIN_NAMES.get(name, name): value for name, value in model.state_dict().items()})


def ours(workload: Workload, task: Task, plan: Plan, topology: Topology) -> Side:
    """A plan carried out on these links; the loop takes its batches through the run where the plan prefetches."""
    model = start(workload)
    optimizer = task.optimizer(model.parameters())
    run = attach(plan, model, optimizer, topology=topology)
    batches = run.batches(_batches(workload)) if plan.looks_ahead else _batches(workload)
    return Side(partial(_train, workload, model, optimizer, batches), partial(_plain, run))


def _batches(workload: Workload) -> Iterator[Any]:
    """Those of this rank, epoch after epoch."""
    return TrainBatches(workload, (dist.get_rank(), dist.get_world_size()), SEED)


def _train(workload: Workload, model: nn.Module, optimizer: Optimizer, batches: Iterator[Any]) -> float:
    """The training loop of one process, one step of it."""
    batch = next(batches)
    optimizer.zero_grad(set_to_none=True)
    loss = workload.loss(model, batch)
    value = loss.item()
    loss.backward()
    optimizer.step()
    return value


def _plain(run: Run) -> Mapping[str, Tensor]:
    """Empty on every rank but 0."""
    whole = run.export()
    return whole["model"] if whole is not None else {}
