"""What each rank holds whole and uses with a piece of its own: its gradient is the sum over ranks."""

import pytest
import torch
from cut_models import HEADS, TOKENS, WIDE, Block, Own, batch, loss
from torch import nn
from torch.nn import functional as F

from armillary import tensor

WIDTH = WIDE // HEADS


class WithNorms(Block):
    """One norm for all heads, one slope for all hidden features."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.head_norm, self.slope = nn.LayerNorm(WIDTH), nn.PReLU()

    def mask(self):
        return None

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, attn_mask=self.mask())
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(self.slope(self.up(self.n2(x))))


class WithMask(WithNorms):
    """A parameter of all heads, as it is."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))

    def mask(self):
        return self.bias


class MadeMask(WithMask):
    def mask(self):
        return 2 * self.bias


class InAList(WithNorms):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(WIDE)), nn.Parameter(torch.randn(WIDE))

    def forward(self, x):
        return super().forward(x + torch.stack([self.one, self.other]).sum(0))


class Conditioned(Own):
    """What is made outside, of all tokens, goes to each block beside the activation; the second gets what the first
    made of its piece, too."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(ByCondition() for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        condition, before = self.condition(x.mean(1, keepdim=True)), None
        for block in self.blocks:
            x, before = block(x, condition, before=before)
        return self.head(x)


class ByCondition(WithNorms):
    def forward(self, x, condition, before):
        return super().forward(x * (1 + condition) + (0 if before is None else before)), x.tanh()


KINDS = {
    "norms": lambda: Own(block=WithNorms),
    "mask": lambda: Own(block=WithMask),
    "made mask": lambda: Own(block=MadeMask),
    "in a list": lambda: Own(block=InAList),
    "conditioned": Conditioned,
}
WAYS = {"columns_rows": {"tensor": 4}, "heads": {"sequence": 4}, "ring": {"sequence": 4}}


def made(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def gradients(rank, world, kind, way):
    part = tensor.cut(made(kind), region="blocks", way=way, mesh=WAYS[way])
    loss(part.model, batch(0, 0)).backward()
    return part.whole_gradients()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_what_ranks_share_are_those_of_one_process(crew, kind, way):
    if way == "ring" and "mask" in kind:
        pytest.skip("a ring takes no learned mask")
    model = made(kind)
    loss(model, batch(0, 0)).backward()
    for found in crew(4).run(gradients, kind, way):
        apart = {name: float((found[name] - one.grad).abs().max()) for name, one in model.named_parameters()}
        assert max(apart.values()) < 1e-12, apart
