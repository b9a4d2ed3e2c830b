"""What is trained: a small transformer that continues made-up text, on the same sequences in every epoch.

The text is drawn from a chain that knows the last two letters, so there is something to learn and a floor below which
no loss comes. There is enough of it: with 48 letters and 512 sequences the model learned those by heart, and its
held-out loss rose from 3.8 to 6.6. Samples return in every epoch, unchanged, as an edge that remembers them wants.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["BIG", "SMALL", "Batch", "Sizes", "held_out", "loss", "model_of", "optimizer_of", "steps_of"]

Batch = tuple[Tensor, Tensor]  # letters (sequences, length), and the letters after them


class Sizes(NamedTuple):
    """micro_batch: in sequences. sequences: of an epoch."""

    width: int
    blocks: int
    letters: int
    length: int
    micro_batch: int
    micro_batches: int
    sequences: int


BIG = Sizes(width=96, blocks=4, letters=16, length=32, micro_batch=8, micro_batches=4, sequences=2048)
SMALL = Sizes(width=16, blocks=4, letters=8, length=8, micro_batch=2, micro_batches=4, sequences=16)


class Letters(nn.Module):
    """Letters and their places, as vectors."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.letters = nn.Embedding(sizes.letters, sizes.width)
        self.places = nn.Parameter(torch.randn(sizes.length, sizes.width) / 10)

    def forward(self, letters: Tensor) -> Tensor:
        return self.letters(letters) + self.places


class Block(nn.TransformerEncoderLayer):
    """Attention to what came before, and two linear layers."""

    def forward(self, value: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(value.shape[1])
        return super().forward(value, src_mask=mask, is_causal=True)


def model_of(sizes: Sizes, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [
        Block(sizes.width, 4, 2 * sizes.width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(sizes.blocks)
    ]
    return nn.Sequential(Letters(sizes), *blocks, nn.Linear(sizes.width, sizes.letters))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def steps_of(sizes: Sizes, seed: int) -> Iterator[list[Batch]]:
    """The micro-batches of every step, epoch after epoch, in another order each time."""
    text, order = _text(sizes, sizes.sequences, 1), torch.Generator().manual_seed(seed)
    while True:
        shuffled = text[torch.randperm(len(text), generator=order)]
        parts = [_pair(part) for part in shuffled.split(sizes.micro_batch)]
        for first in range(0, len(parts), sizes.micro_batches):
            yield parts[first : first + sizes.micro_batches]


def held_out(sizes: Sizes) -> Batch:
    return _pair(_text(sizes, 128, 2))


def _pair(text: Tensor) -> Batch:
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _text(sizes: Sizes, sequences: int, seed: int) -> Tensor:
    chances = torch.rand(sizes.letters, sizes.letters, sizes.letters, generator=torch.Generator().manual_seed(0)) ** 12
    draw, text = torch.Generator().manual_seed(seed), [torch.zeros(sequences, dtype=torch.long) for _ in range(2)]
    for _ in range(sizes.length + 1):
        text.append(torch.multinomial(chances[text[-2], text[-1]], 1, generator=draw)[:, 0])
    return torch.stack(text[2:], 1)
