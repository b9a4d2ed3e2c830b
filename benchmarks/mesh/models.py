"""Two models, each a few blocks of an ordinary transformer between two linear layers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES = 16


class Block(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.head_width = wide // heads
        self.n1, self.n2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.q, self.k, self.v, self.o = (nn.Linear(wide, wide) for _ in range(4))
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    def __init__(self, wide: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, wide)
        self.blocks = nn.ModuleList(Block(wide, heads) for _ in range(blocks))
        self.last = nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """samples: of a whole step. Rows are samples by tokens."""

    wide: int
    heads: int
    blocks: int
    samples: int
    tokens: int

    def model(self) -> Net:
        torch.manual_seed(0)
        return Net(self.wide, self.heads, self.blocks)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, self.tokens, FEATURES, generator=generator)
        return x, x.sum(-1, keepdim=True)


CASES = {
    "long": Case(wide=96, heads=8, blocks=1, samples=16, tokens=96),  # 16 rows for each of its width
    "longer": Case(wide=160, heads=8, blocks=4, samples=16, tokens=160),  # the same, where bytes outweigh latencies
    "wide": Case(wide=384, heads=8, blocks=1, samples=8, tokens=16),  # a third of a row
}
SMALL = Case(wide=16, heads=8, blocks=1, samples=8, tokens=8)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])
