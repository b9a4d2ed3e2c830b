"""The two models of the page: a transformer of twelve blocks, and ResNet-50's bottlenecks on smaller images."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """make: a new model; shape: of a batch; stages: its chain."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1 x 1, 3 x 3, 1 x 1."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.side: nn.Module = nn.Identity()
        if stride > 1 or given != 4 * width:
            self.side = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.side(x))


def _transformer() -> nn.Module:
    return nn.Sequential(*[Block(384, 6) for _ in range(12)])


def _resnet() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    given = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(given, width, stride if number == 0 else 1))
            given = 4 * width
    return nn.Sequential(*parts)


MODELS = {
    "transformer": Subject(_transformer, (4, 256, 384), (1, 64, 384)),
    "ResNet-50": Subject(_resnet, (16, 3, 48, 48), (2, 3, 16, 16)),
}
