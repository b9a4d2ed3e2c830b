"""What both revisions train: models, data and how a step is taken, through the library's face alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.model import Sizes, batches, seeded_model

__all__ = ["CASES", "SMALL_TABLES", "Case"]

Batch = Any
TABLES = Sizes(vocabulary=100_000)  # of 400,000 in `peers`: here three models are alive in every rank
SMALL_TABLES = Sizes(vocabulary=2_000, features=16, hidden=8, projection=4, sentences=2, words=4, negatives=64)


@dataclass(frozen=True)
class Case:
    """
    Args of note:
        schedule: as the command line takes it.
        workers: of the job. micro_batches: that a rank hands in at a step.
        constraints: how parameters must travel, so that both revisions carry out the same plan.
        mbit_per_second: of every link.
    """

    schedule: str
    workers: int
    mbit_per_second: float
    model: Callable[[bool], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[bool, int], Iterator[Batch]]
    micro_batches: int = 1
    constraints: Mapping[str, str] | None = None


def _layers(small: bool) -> nn.Module:
    width = 8 if small else 1000
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])


def _noise(small: bool, rank: int) -> Iterator[Batch]:
    """The same batch at every step: drawing would cost time that is nobody's exchange."""
    width, samples = (8, 4) if small else (1000, 112)
    stream = torch.Generator().manual_seed(rank)
    batch = torch.randn(samples, width, generator=stream), torch.randn(samples, width, generator=stream)
    while True:
        yield batch


def _distance(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _words(small: bool) -> nn.Module:
    return seeded_model(SMALL_TABLES if small else TABLES, sparse=False)


def _sentences(small: bool, rank: int) -> Iterator[Batch]:
    return batches(SMALL_TABLES if small else TABLES, rank)


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(*batch)
    return value


def _dense(schedule: str, workers: int, micro_batches: int = 1, mbit_per_second: float = 1000) -> Case:
    return Case(schedule, workers, mbit_per_second, _layers, _distance, _noise, micro_batches)


def _tables(mbit_per_second: float, schedule: str = "simultaneous") -> Case:
    owned = dict.fromkeys(("inputs.weight", "outputs.weight"), "owned_rows")
    return Case(schedule, 8, mbit_per_second, _words, _own_loss, _sentences, 1, owned)


CASES: Mapping[str, Case] = {
    "lm8, 100 Mbit/s": _tables(100),
    "lm8, 1 Gbit/s": _tables(1000),
    "dense": _dense("simultaneous", 2),
    "accumulation": _dense("accumulation(micro_batches=4)", 2, 4),
    "delayed all-reduce": _dense("delayed_all_reduce", 2),
    "gpipe M=4": _dense("gpipe(micro_batches=4)", 2, 4),
    "1f1b M=4": _dense("one_f_one_b(micro_batches=4)", 2, 4),
    "pipeline M=2": _dense("pipeline(micro_batches=2)", 2, 2),
    "pipeline M=4": _dense("pipeline(micro_batches=4)", 2, 4),
    "ring N=2": _dense("ring", 2),
    "ring N=3": _dense("ring", 3),
    "zero_ring N=2": _dense("zero_ring", 2),
    "one_device M=2": _dense("one_device(micro_batches=2, stages=2)", 1, 2),
    "shared N=2": _dense("shared_stages", 3, 2),
}
