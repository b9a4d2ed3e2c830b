"""Models, data and losses for tests of local losses."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 4


def perceptron(seed=0, width=16, layers=6):
    """Layers "0" to "5"; each but the last a Linear and a ReLU."""
    torch.manual_seed(seed)
    sizes = [8, *[width] * (layers - 1), CLASSES]
    made = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes[:-1])]
    return nn.Sequential(*made, nn.Linear(*sizes[-2:]))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        return F.relu(x + self.body(x))


def convolutions(seed=0, dropout=0.2):
    """Images of 8 x 8 to scores. One ReLU object serves twice; dropout draws random numbers."""
    torch.manual_seed(seed)
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), relu, Residual(6), nn.Dropout2d(dropout),
        nn.Conv2d(6, 8, 3, stride=2, padding=1), relu, Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def rows(number, count=12):
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(count, 8, generator=draw)
    return x, (x[:, :CLASSES] + 0.1 * torch.randn(count, CLASSES, generator=draw)).argmax(1)


def images(number, count=6):
    draw = torch.Generator().manual_seed(number)
    y = torch.randint(CLASSES, (count,), generator=draw)
    return torch.rand(count, 1, 8, 8, generator=draw) * (0.3 + 0.2 * y[:, None, None, None]), y


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
