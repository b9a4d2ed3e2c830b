"""Models with a region, their one-process truth in plain torch, and what ranks do with a cut model. Nothing of the room
is used by the truth."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from armillary import tensor

WIDE, HEADS, HIDDEN, WORDS = 16, 4, 32, 11
SAMPLES, TOKENS = 5, 7  # of a replica; both odd
STEPS, CLIP = 3, 0.05


class Block(nn.Module):
    """A user's own; both norms, a causal attention, biases but one."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDE), nn.RMSNorm(WIDE)
        self.q, self.k, self.v = (nn.Linear(WIDE, WIDE, bias=name != "k") for name in "qkv")
        self.o, self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, HIDDEN), nn.Linear(HIDDEN, WIDE)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(a.transpose(1, 2).flatten(2)))
        return x + self.down(self.drop(F.gelu(self.up(self.n2(x)))))


class Fused(nn.Module):
    """Three and two matrices in one weight, as Hugging Face names them, and a layer that a role must be given."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.other = nn.RMSNorm(WIDE), nn.LayerNorm(WIDE, bias=False)
        self.qkv, self.mixed = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.gate_up_proj, self.down_proj = nn.Linear(WIDE, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDE)

    def forward(self, x):
        q, k, v = (
            one.unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        x = x + self.mixed(a.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.other(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class Own(nn.Module):
    def __init__(self, dropout=0.0, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Torchs(nn.Module):
    """nn.TransformerEncoder, with a mask over tokens and one over padding; samples first, or tokens."""

    def __init__(self, batch_first=True, norm_first=False, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDE, HEADS, HIDDEN, dropout, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.batch_first = batch_first
        self.embedding = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for number, parameter in enumerate(self.blocks.parameters()):
            with torch.no_grad():  # so that biases and norms are not what they begin as
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids):
        hidden = ids == 0
        hidden[:, 0] = False
        tokens = ids.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        x = self.embedding(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.blocks(x, mask=later, src_key_padding_mask=hidden)
        return self.head(x if self.batch_first else x.transpose(0, 1))


MODELS = {
    "own": (Own, "blocks"),
    "fused": (lambda: Own(block=Fused), "blocks"),
    "torch's": (Torchs, "blocks.layers"),
    "torch's, tokens first": (lambda: Torchs(False, True), "blocks.layers"),
}
ROLES = {"*.mixed": "row"}


def made(name):
    torch.manual_seed(0)
    kind, region = MODELS[name]
    return kind().double(), region


def batch(replica, step, samples=SAMPLES, tokens=TOKENS):
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randint(WORDS, (samples, tokens + 1), generator=generator)


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def truth(name, replicas, steps=STEPS, **sizes):
    """Weights and optimizer's state of one process that takes the mean over replicas; and the norms."""
    model, _ = made(name)
    optimizer, norms = adam(model), []
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, batch(one, step, **sizes)) for one in range(replicas)) / replicas).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "norms": norms}


def over_data(part):
    """The mean over replicas, as any data parallelism makes it."""
    for parameter in part.model.parameters():
        dist.all_reduce(parameter.grad, group=part.data_group)
        parameter.grad /= part.replicas


def trained(part, optimizer, first=0, steps=STEPS, **sizes):
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(part.model, batch(part.data_rank, step, **sizes)).backward()
        over_data(part)
        norms.append(float(part.clip_grad_norm_(CLIP)))
        optimizer.step()
    return norms


def cut(name, way, mesh, **options):
    model, region = made(name)
    return tensor.cut(model, region=region, way=way, mesh=mesh, roles=ROLES, **options)


def state_of(rank, world, name, way, mesh, sizes):
    """The whole state after three steps, and the norms."""
    part = cut(name, way, mesh)
    optimizer = adam(part.model)
    norms = trained(part, optimizer, **sizes)
    state = part.whole_state(optimizer)
    return norms, None if state is None else copy.deepcopy(state)


def largest(one, other, path=""):
    """The largest difference of two states, and where; structures must be alike."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (path, one.keys() ^ other.keys())
        return max((largest(one[key], other[key], f"{path}.{key}") for key in one), default=(0.0, path))
    if isinstance(one, list | tuple):
        assert len(one) == len(other), path
        return max((largest(a, b, f"{path}.{at}") for at, (a, b) in enumerate(zip(one, other))), default=(0.0, path))
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape, (path, one.shape, other.shape)
        return float((one - other).abs().max()), path
    if isinstance(one, float):
        return abs(one - other), path
    assert one == other, (path, one, other)
    return 0.0, path
