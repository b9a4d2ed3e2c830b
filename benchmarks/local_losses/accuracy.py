"""One training of the net: by backpropagation, by local losses, or over a lower part that stays as it was drawn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary import local_losses
from armillary.models.preserved_state import LiveBytes
from benchmarks.local_losses.nets import BATCH, Data, accuracy, batches, data, loss, resnet20

__all__ = ["WAYS", "step_bytes", "trained"]

Batch = tuple[Tensor, Tensor]
CUT = "layer2"


def _pooled() -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def _local(**options: Any) -> Callable[[nn.Sequential, Batch], tuple[list[nn.Parameter], Callable[[Batch], Tensor]]]:
    def made(model: nn.Sequential, example: Batch) -> tuple[list[nn.Parameter], Callable[[Batch], Tensor]]:
        kept = {name: make() if callable(make) else make for name, make in options.items()}
        local = local_losses.split(model, loss, example, at=[CUT], **kept)
        return list(local.parameters()), local.loss

    return made


def _end_to_end(model: nn.Sequential, example: Batch) -> tuple[list[nn.Parameter], Callable[[Batch], Tensor]]:
    return list(model.parameters()), lambda batch: loss(model, batch)


def _frozen(model: nn.Sequential, example: Batch) -> tuple[list[nn.Parameter], Callable[[Batch], Tensor]]:
    """Running statistics below are learnt, weights are not."""
    lower, upper = model[:2], model[2:]
    lower.requires_grad_(False)
    return list(upper.parameters()), lambda batch: loss(lambda x: upper(lower(x)), batch)  # type: ignore[arg-type]


WAYS: Mapping[str, Any] = {
    "backpropagation": _end_to_end,
    "local": _local(),
    "frozen lower part": _frozen,
    "local, pooled linear head": _local(head=_pooled),
    "local, InfoPro": _local(objective="infopro"),
}


def trained(way: str, seed: int, images: int, epochs: int) -> Mapping[str, Any]:
    """Accuracy and processor seconds behind each epoch."""
    torch.set_num_threads(1)
    train, test = data("train", images), data("test", 5000 if images > 1000 else 500)
    model = resnet20(seed)
    weights, of = WAYS[way](model, next(batches(train, seed, 0)))
    optimizer = torch.optim.Adam(weights, 2e-3)
    steps = epochs * -(-images // BATCH)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    found, seconds = [], 0.0
    for epoch in range(epochs):
        began = time.process_time()
        for batch in batches(train, seed, epoch):
            optimizer.zero_grad()
            of(batch).backward()
            optimizer.step()
            rate.step()
        seconds += time.process_time() - began
        found.append([seconds, accuracy(model, test)])
    return {"epochs": found}


def _checkpointed(part: nn.Sequential, value: Tensor) -> Tensor:
    made: Tensor = checkpoint(part, value, use_reentrant=False)
    return made


def step_bytes(images: int) -> Mapping[str, float]:
    """The most bytes of tensors that a step makes, by way."""
    batch: Data = data("train", images)
    one = (batch.images[:64], batch.labels[:64])
    found = {}
    for way in ("backpropagation", "local", "torch's checkpoint of both parts"):
        model = resnet20(0)
        if way in WAYS:
            _, of = WAYS[way](model, one)
        else:

            def of(batch: Batch, model: nn.Sequential = model) -> Tensor:
                return loss(lambda x: _checkpointed(model[2:], _checkpointed(model[:2], x)), batch)  # type: ignore[arg-type]

        of(one).backward()  # what is made once
        for weight in model.parameters():
            weight.grad = None
        live = LiveBytes()
        with live:
            live.mark()
            of(one).backward()
        found[way] = float(live.added_bytes)
    return found
