"""A small model with one table, its loss and its data."""

import torch
from torch import nn
from torch.nn import functional

ROWS, WIDTH = 11, 4


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def loss(model, batch):
    ids, targets = batch
    return functional.mse_loss(model(ids), targets)


def batch_of(step, worker):
    draw = torch.Generator().manual_seed(100 * step + worker)
    return torch.randint(ROWS, (3,), generator=draw), torch.randn(3, 2, generator=draw)
