"""What gossip does to accuracy and sends for it: ranks of a ring in one process, by a job's own programs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import armillary
from armillary.exchanges import build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.session.twin import Lockstep
from armillary.workloads import vision

__all__ = ["WAYS", "Digits", "digits", "trained"]

WAYS = {
    "D-PSGD": "gossip(horizon=0.0)",
    "keep": "gossip(horizon=1.0)",
    "replace, as published": "gossip(horizon=1.0, mixing=replace, cap=1000000)",
    "replace, cap 20": "gossip(horizon=1.0, mixing=replace)",
}
BATCH, RATE = 16, 0.05


class Digits(NamedTuple):
    """1,797 scanned digits: pixels (images, 64) from 0 to 1, labels (images,); three quarters of them train."""

    pixels: Tensor
    labels: Tensor


def digits() -> Digits:
    """Shuffled, the same every time. Made-up ones where scikit-learn, which brings them, is not installed."""
    try:
        found = vision.digits()
        pixels = np.concatenate([found.train, found.held_out]).reshape(-1, 64)
        labels = np.concatenate([found.train_labels, found.held_out_labels])
    except ValueError:
        made = vision.patterns(images=400, side=8, classes=10)
        pixels, labels = made.train.reshape(-1, 64), made.train_labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    scaled = torch.from_numpy(pixels).float()
    return Digits(scaled[order] / float(scaled.max()), torch.from_numpy(labels).long()[order])


def trained(split: str, way: str, seed: int, workers: int, steps: int) -> Mapping[str, Any]:
    """
    Args:
        split: "shuffled", or "by label": each rank has the images of few digits.
    """
    data, choice, answer = digits(), armillary.Choice.parse(WAYS[way]), Lockstep(1)
    exchange = build_dense(choice.name, **choice.options)
    train = len(data.labels) * 3 // 4
    order = torch.argsort(data.labels[:train], stable=True) if split == "by label" else torch.arange(train)
    shares = order[: train // workers * workers].view(workers, -1)
    draws = [torch.Generator().manual_seed(100 * seed + rank) for rank in range(workers)]
    model = _net()
    names = tuple(name for name, _ in model.named_parameters())
    side = Replicas(
        model, lambda one: torch.optim.SGD(one.parameters(), RATE), workers, [SharedGroup(names, exchange)], answer
    )
    tensors, values, oldest = 0.0, 0.0, 0.0
    for _ in range(steps):
        picked = [mine[torch.randint(0, len(mine), (BATCH,), generator=draw)] for mine, draw in zip(shares, draws)]
        side.step([(data.pixels[these], data.labels[these]) for these in picked], _loss)
        for state in side.states[0]:
            ages = state["pass"] - state["last"]
            tensors += float((ages == 0).double().mean())
            values += exchange.density(side.layouts[0], state)
            oldest = max(oldest, float(ages.max()) + 1)
    with torch.no_grad():
        for name, mean in side.consensus().items():
            model.get_parameter(name).copy_(mean)
        scores = model(data.pixels[train:])
        accuracy = float((scores.argmax(1) == data.labels[train:]).double().mean())
    count = workers * steps
    return {
        "accuracy": accuracy, "tensors": tensors / count, "values": values / count, "oldest": oldest,
        "sent_bytes": answer.sent_bytes / steps, "steps": steps,
    }  # fmt: skip


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
