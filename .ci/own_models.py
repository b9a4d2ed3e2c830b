"""Workloads for `.ci/advice`: blocks with attention before a recurrence, on numbers or words; a chain of layers."""

import itertools

import torch
from torch import nn

WORDS = 4000


class Blocks(nn.Module):
    """Two blocks of an encoder, then a recurrence over twenty steps. words: of a table that is read; 0: numbers are."""

    def __init__(self, words):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.read = nn.Embedding(words, 16) if words else nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(self.encoder(self.read(x)))[0][:, -1])


class Workload:
    name, unit, steps, batch_size = "own", "samples", 4, 8

    def __init__(self, kind):
        self.kind = kind
        self.shape = {"blocks": (20, 8), "tables": (20,), "chain": (8,)}[kind]

    def model(self):
        if self.kind != "chain":
            return Blocks(WORDS if self.kind == "tables" else 0)
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def batches(self, split, worker, workers, seed):
        draw = torch.Generator().manual_seed(seed * 100 + worker)
        for _ in itertools.repeat(None, 16):
            x = torch.randn(self.batch_size, *self.shape, generator=draw)
            if self.kind == "tables":
                x = torch.randint(0, WORDS, x.shape, generator=draw)
            yield x, torch.randint(0, 3, (self.batch_size,), generator=draw)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def samples(self, batch):
        return len(batch[1])

    def evaluate(self, model, batch):
        return {"right": float((model(batch[0]).argmax(1) == batch[1]).sum()), "all": float(len(batch[1]))}

    def report(self, totals):
        return {"accuracy": totals["right"] / totals["all"]}


def workload(kind="chain"):
    return Workload(kind)
