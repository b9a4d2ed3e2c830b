"""What is trained: the perceptron of the page on lossy exchanges, by AdamW, on images shuffled or by label."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.lossy.tasks import TASKS

__all__ = ["HOSTS", "SPLITS", "accuracy", "batch_of", "loss", "made"]

HOSTS, BATCH, RATE, HELD_OUT = 4, 64, 1e-3, 2000
SPLITS = ("shuffled", "by label")


class _Data(NamedTuple):
    images: Tensor  # (n, 1, side, side)
    labels: Tensor
    held_out: tuple[Tensor, Tensor]
    pools: tuple[Tensor, ...]  # by rank, the images that it draws from


@functools.cache
def _workload(is_small: bool) -> Any:
    return TASKS["perceptron"].workload(is_small, "")


@functools.cache
def _data(is_small: bool, split: str) -> _Data:
    known = _workload(is_small).images
    mean, deviation = known.scale

    def scaled(pixels: Any) -> Tensor:
        return ((torch.from_numpy(pixels).float() - mean) / deviation).unsqueeze(1)

    labels = torch.from_numpy(known.train_labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if split == "by label":
        order = torch.argsort(labels, stable=True)
    held_out = scaled(known.held_out[:HELD_OUT]), torch.from_numpy(known.held_out_labels[:HELD_OUT])
    return _Data(scaled(known.train), labels, held_out, order.chunk(HOSTS))


def batch_of(is_small: bool, split: str, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's in a step: 64 of its own quarter of the images."""
    data = _data(is_small, split)
    draw = torch.Generator().manual_seed((seed * 1_000_003 + step) * HOSTS + rank)
    own = data.pools[rank]
    chosen = own[torch.randint(len(own), (BATCH,), generator=draw)]
    return data.images[chosen], data.labels[chosen]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class _Made(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE)


def made(is_small: bool, seed: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> _Made:
    """The same on every rank."""
    torch.manual_seed(seed)
    model = _workload(is_small).model()
    return _Made(model, optimizer(model))


@torch.no_grad()
def accuracy(model: nn.Module, is_small: bool) -> float:
    """In percent, on held-out images."""
    images, labels = _data(is_small, SPLITS[0]).held_out
    return 100 * float((model(images).argmax(1) == labels).float().mean())
