"""Fashion-MNIST at 16 x 16, and a net shaped like ResNet-20."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads.vision import FASHION_MNIST, fashion_mnist

__all__ = ["FASHION_MNIST", "Data", "accuracy", "batches", "data", "loss", "resnet20"]

BATCH = 64


class Data(NamedTuple):
    """Images (n, 1, 16, 16) in 0 to 1, and their classes."""

    images: Tensor
    labels: Tensor


@cache
def data(split: str, count: int) -> Data:
    """The first `count` of "train" or "test"."""
    found = fashion_mnist()
    pixels, labels = (found.train, found.train_labels) if split == "train" else (found.held_out, found.held_out_labels)
    images = torch.from_numpy(pixels[:count]).float().unsqueeze(1) / 255
    return Data(F.avg_pool2d(images, 2), torch.from_numpy(labels[:count]))


def batches(train: Data, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in an order of its own, which all contenders of a seed see."""
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    for chosen in order.split(BATCH):
        yield train.images[chosen], train.labels[chosen]


def accuracy(model: nn.Module, test: Data) -> float:
    """In percent; the model is in training mode again afterwards."""
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).sum() for x, y in zip(test.images.split(500), test.labels.split(500), strict=True)
        ]
    model.train()
    return 100 * float(sum(right)) / len(test.labels)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        is_same = before == channels and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet20(seed: int, width: int = 16) -> nn.Sequential:
    """Stem, three layers of three blocks at 16 x 16, 8 x 8 and 4 x 4, pooling, classes."""
    torch.manual_seed(seed)
    stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    named: list[tuple[str, nn.Module]] = [("stem", stem)]
    before = width
    for number, channels in enumerate((width, 2 * width, 4 * width), 1):
        first = Block(before, channels, 1 if number == 1 else 2)
        blocks = [first, *(Block(channels, channels, 1) for _ in range(2))]
        named.append((f"layer{number}", nn.Sequential(*blocks)))
        before = channels
    named += [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("classes", nn.Linear(before, 10))]
    return nn.Sequential(OrderedDict(named))
