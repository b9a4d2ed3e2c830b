"""The workloads that come with the package, by name; and what plans are made from, the same on every rank."""

from collections.abc import Mapping
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["PROFILED_STEPS", "Start", "find", "first_batches", "start"]

PROFILED_STEPS = 2


class Start(NamedTuple):
    """A model at its start, the same on every rank, with its optimizer."""

    model: nn.Module
    optimizer: Optimizer


def find(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Without options its small version."""
    module = import_module(f"armillary.workloads.{name}")
    return module.workload(**(module.SMALL if options is None else options))


def start(workload: Any, seed: int = 0) -> Start:
    torch.manual_seed(seed)
    model = workload.model()
    return Start(model, workload.optimizer(model.parameters()))


def first_batches(workload: Any, workers: int, steps: int = PROFILED_STEPS, seed: int = 0) -> list[Any]:
    """Step by step, worker by worker: what all workers draw in their first steps."""
    drawn = [list(islice(workload.batches("train", worker, workers, seed), steps)) for worker in range(workers)]
    return [batch for together in zip(*drawn) for batch in together]
