"""Small ordinary models, their losses and data, for the tests of outcomes; the same in every process.

A batch of a model with tables holds the seed of its random numbers, so that one process draws for it what a rank does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, WIDTH, SIZE, CLASSES = 29, 4, 6, 3
Batch = tuple[Tensor, ...]

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


class Reader(nn.Module):
    """A table of words that is read by row, and layers with dropout above it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, CLASSES))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.words(words).sum(1))


class Idle(Reader):
    """`rare` is used by batches whose first word is even, `never` by none, `frozen` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Parameter(torch.ones(CLASSES)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((CLASSES,), 1.5), requires_grad=False)

    def forward(self, words: Tensor) -> Tensor:
        scores = super().forward(words) * self.frozen
        return scores * self.rare if int(words[0, 0]) % 2 == 0 else scores


class Tied(nn.Module):
    """Words come in by row, and go out through the same weights, read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(self.words(words).mean(1))))


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return kind().to(dtype)


def word_batch(worker: int, step: int, size: int = SIZE) -> Batch:
    """Skewed words with repeats, classes, and the seed of its random numbers."""
    number = 1000 * step + worker
    draw = torch.Generator().manual_seed(number)
    words = (torch.rand(size, 3, generator=draw) ** 2 * ROWS).long()
    return words, torch.randint(CLASSES, (size,), generator=draw), torch.tensor(number)


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    words, classes, seed = batch
    torch.manual_seed(int(seed))
    return functional.cross_entropy(model(words), classes)


def chain(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Four blocks, to be cut into stages."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


def pair_batch(step: int, micro_batch: int, dtype: torch.dtype = torch.float64) -> Batch:
    draw = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randn(2, 3, WIDTH, generator=draw, dtype=torch.float64).to(dtype).unbind()


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])
