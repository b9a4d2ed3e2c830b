"""Three ordinary training scripts: model, optimizer and batches, as a stranger would write them for one device."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SCRIPTS", "Script"]


class Script(NamedTuple):
    """batch: of one rank, drawn from its generator; the model maps a batch to its loss."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]

    def batches(self, rank: int) -> Iterator[tuple[Tensor, ...]]:
        draw = torch.Generator().manual_seed(rank + 1)
        while True:
            yield self.batch(draw)


class Recommender(nn.Module):
    """Two tables of ids and a tower, as in DLRM."""

    USERS, ITEMS, WIDTH = 60_000, 40_000, 64

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(self.USERS, self.WIDTH), nn.Embedding(self.ITEMS, self.WIDTH)
        self.tower = nn.Sequential(
            nn.Linear(2 * self.WIDTH, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, users: Tensor, items: Tensor, clicks: Tensor) -> Tensor:
        score = self.tower(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(score, clicks)


class TiedGPT(nn.Module):
    """A small GPT whose output is its embedding."""

    WORDS, WIDTH, LENGTH, LAYERS = 8_000, 128, 64, 3

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(self.WORDS, self.WIDTH), nn.Embedding(self.LENGTH, self.WIDTH)
        layer = nn.TransformerEncoderLayer(self.WIDTH, 4, 4 * self.WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, self.LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.output.weight = self.words.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.words(inputs) + self.places.weight
        scores = self.output(self.layers(hidden, mask=self.mask, is_causal=True))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Convolution(nn.Module):
    """A small image classifier with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 32, 64, 128]
        layers = list[nn.Module]()
        for inner, outer in pairwise(sizes):
            layers += [nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        self.layers, self.output = nn.Sequential(*layers), nn.Linear(128 * 16, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.output(self.layers(images).flatten(1)), labels)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def _clicks(draw: torch.Generator) -> tuple[Tensor, ...]:
    users = torch.randint(Recommender.USERS, (512,), generator=draw)
    items = (torch.rand(512, generator=draw) ** 3 * Recommender.ITEMS).long()  # few are asked for often
    return users, items, torch.randint(2, (512,), generator=draw).float()


def _tokens(draw: torch.Generator) -> tuple[Tensor, ...]:
    return ((torch.rand(4, TiedGPT.LENGTH + 1, generator=draw) ** 2 * TiedGPT.WORDS).long(),)


def _images(draw: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(16, 3, 32, 32, generator=draw), torch.randint(100, (16,), generator=draw)


SCRIPTS: dict[str, Script] = {
    "recommender": Script(Recommender, lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02), _clicks),
    "tied GPT": Script(TiedGPT, _adam, _tokens),
    "convolution": Script(
        Convolution, lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), _images
    ),
}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
    """One training step, as any loop has it."""
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()
