"""ViT-B/16-, ResNet-50- and GPT-2-small-shaped models for a CPU: depth and shapes kept, channels and images smaller.

Each is a chain of links, transformers cut between attention and perceptron, so a stage is a link. Departures: ViT
averages its patches and has 96 channels instead of 768, images of 112 pixels with patches of 8 (196, as in the paper);
ResNet has 16 base channels instead of 64, images of 96 pixels instead of 224, and GroupNorm; GPT-2 has 96 channels, 192
positions and 3,072 words (8, 5 and 16 times fewer) and does not tie its head.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, POSITIONS, WORDS = 96, 3, 12, 192, 3072


class Shape(NamedTuple):
    """A model and how to make a micro-batch (input, target) of so many samples."""

    model: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def shapes() -> Mapping[str, Shape]:
    return {
        "ViT-B/16": Shape(_vit, _images(112)),
        "GPT-2 small": Shape(_gpt, _words),
        "ResNet-50": Shape(_resnet, _images(96)),
    }


class Attention(nn.Module):
    """x + attention(norm(x)), x (samples, positions, WIDTH)."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal, self.norm = is_causal, nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = (
            self.queries_keys_values(self.norm(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*split.unbind(0), is_causal=self.is_causal)
        out: Tensor = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Perceptron(nn.Module):
    """x + perceptron(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class Patches(nn.Module):
    """Images (samples, 3, side, side) to patches (samples, patches, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Words(nn.Module):
    """Ids (samples, positions) to vectors with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(POSITIONS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids) + self.positions
        return out


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al., 2016; the stride is on the 3 x 3 one)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.body(x) + self.shortcut(x)
        return joined.relu_()


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.GroupNorm(4, out)]


def _halves(is_causal: bool) -> list[nn.Module]:
    return [half for _ in range(DEPTH) for half in (Attention(is_causal), Perceptron())]


def _vit() -> nn.Sequential:
    return nn.Sequential(Patches(), *_halves(False), _together(nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, 100)))


def _gpt() -> nn.Sequential:
    return nn.Sequential(Words(), *_halves(True), _together(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)))


def _resnet() -> nn.Sequential:
    links: list[nn.Module] = [_together(*_convolution(3, 16, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))]
    channels = 16
    for group, depth in enumerate((3, 4, 6, 3)):
        for place in range(depth):
            links.append(Bottleneck(channels, 16 * 2**group, 2 if group and not place else 1))
            channels = 64 * 2**group
    return nn.Sequential(*links, _together(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100)))


class _Link(nn.Module):
    """Some modules that stay in one stage."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.modules_in_order = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules_in_order:
            x = module(x)
        return x


_together = _Link


def _images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, 3, side, side), torch.randint(100, (samples,)))


def _words(samples: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (samples, POSITIONS + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
