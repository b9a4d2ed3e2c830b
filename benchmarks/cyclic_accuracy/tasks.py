"""The two tasks, sized for two cores: a narrow ResNet-18 on Fashion-MNIST, and the LSTM language model with AdamW."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.models.structure import balanced
from armillary.stages.partition import chain, costs, cut
from armillary.workloads import language_model, vision
from benchmarks.cyclic_accuracy.language_stages import language_stages, sampled_loss
from benchmarks.cyclic_accuracy.rules import WORKERS

__all__ = ["TASKS", "Cut", "Task"]

HELD_OUT_BATCHES = 40  # of the language model: the full softmax over all held-out words would take minutes
LANGUAGE_COSTS = ((1.0, 2.0), (13.0, 24.0), (2.0, 4.0), (11.0, 13.0))  # tenths of ms, measured once and kept

MicroBatch = tuple[Any, Any]  # what the first stage reads, what the loss compares with


@dataclass(frozen=True)
class Cut:
    """A model and its stages. `costs`: per stage (forward, backward), which decide what is fresh."""

    model: Any
    stages: Sequence[nn.Module]
    costs: Sequence[tuple[float, float]]
    loss: Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Task:
    """
    Args:
        steps: of the runs of the sweep, which are of all rules.
        rates: where the sweep begins; it goes on past an end that is the best.
    """

    make: Callable[[], Cut]
    epoch: Callable[[int], Iterator[list[MicroBatch]]]
    optimizer: Callable[[Any, float, bool], torch.optim.Optimizer]
    evaluate: Callable[[Any], dict[str, float]]
    steps: int
    samples_a_step: int
    unit: str
    rates: tuple[float, ...]

    def micro_batches(self, seed: int) -> Iterator[list[MicroBatch]]:
        """Of step after step, epoch after epoch, without end; the same for every rule."""
        for epoch in count():
            yield from self.epoch(1000 * seed + epoch)


@functools.cache
def _vision() -> vision.Vision:
    return vision.workload(width=8, batch_size=32)


def _halved(images: Tensor) -> Tensor:
    """32 x 32 (28 x 28 and a black edge) to 16 x 16, by means of 2 x 2."""
    return F.avg_pool2d(images, 2)


def _vision_cut() -> Cut:
    model = _vision().model()
    links = chain(model)
    with torch.random.fork_rng(devices=[]):
        prices = costs(links, torch.randn(2, 1, 16, 16))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    points = balanced(prices, WORKERS)
    edges = list(zip([0, *points], [*points, len(links)]))
    of_stages = [(sum(f for f, _ in prices[a:b]), sum(b for _, b in prices[a:b])) for a, b in edges]
    return Cut(model, [stage.module for stage in cut(model, links, points)], of_stages, F.cross_entropy)


def _vision_epoch(seed: int) -> Iterator[list[MicroBatch]]:
    shares = [_vision().batches("train", worker, WORKERS, seed) for worker in range(WORKERS)]
    for batches in zip(*shares):
        yield [(_halved(images), labels) for images, labels in batches]


def _vision_optimizer(model: nn.Module, rate: float, is_nesterov: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4, nesterov=is_nesterov)


def _vision_scores(model: nn.Module) -> dict[str, float]:
    """Of all 10,000 held-out images."""
    batches = ((_halved(images), labels) for images, labels in _vision().batches("held_out", 0, 1, 0))
    return _scores(_vision(), model, batches)


@functools.cache
def _language() -> language_model.LanguageModel:
    return language_model.workload(min_count=50, width=64, hidden=128, batch_size=32, negatives=256)


def _language_cut() -> Cut:
    model = _language().model()
    return Cut(model, language_stages(model), LANGUAGE_COSTS, sampled_loss)


def _language_epoch(seed: int) -> Iterator[list[MicroBatch]]:
    shares = [_language().batches("train", worker, WORKERS, seed) for worker in range(WORKERS)]
    for batches in zip(*shares):
        yield [(batch, None) for batch in batches]


def _language_optimizer(model: nn.Module, rate: float, is_nesterov: bool) -> torch.optim.Optimizer:
    if is_nesterov:
        return torch.optim.NAdam(model.parameters(), rate, weight_decay=0.01, decoupled_weight_decay=True)
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)


def _language_scores(model: language_model.SampledSoftmaxLSTM) -> dict[str, float]:
    """Of the first held-out batches, by the full softmax."""
    return _scores(_language(), model, islice(_language().batches("held_out", 0, 1, 0), HELD_OUT_BATCHES))


def _scores(work: Any, model: nn.Module, batches: Iterator[Any]) -> dict[str, float]:
    totals: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            for name, value in work.evaluate(model, batch).items():
                totals[name] = totals.get(name, 0.0) + value
    model.train()
    found: dict[str, float] = work.report(totals)
    return found


TASKS: Mapping[str, Task] = {
    "vision": Task(
        _vision_cut, _vision_epoch, _vision_optimizer, _vision_scores, steps=300,
        samples_a_step=32 * WORKERS, unit="images", rates=(0.025, 0.05, 0.1, 0.2),
    ),
    "language_model": Task(
        _language_cut, _language_epoch, _language_optimizer, _language_scores, steps=300,
        samples_a_step=32 * 24 * WORKERS, unit="words", rates=(0.002, 0.004, 0.008, 0.016),
    ),
}  # fmt: skip
