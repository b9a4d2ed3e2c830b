"""Small trained-looking models, and a way to cut them once."""

import torch
import torch.nn.functional as F
from torch import nn

from armillary import repurpose

WORKERS = 3


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 18), nn.ReLU(), nn.Linear(18, 15), nn.Tanh(), nn.Linear(15, 4)).double()


class Convolutions(nn.Module):
    """Functions, in-place modules and BatchNorm, as people write them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(6, 9, 3, stride=2, padding=1)
        self.third = nn.Linear(36, 12)
        self.norms = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(12, 5)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = torch.tanh(self.norms(self.third(torch.flatten(x, 1))))
        return self.last(self.drop(x))


def convolutions():
    torch.manual_seed(0)
    model = Convolutions().double()
    for _ in range(3):  # statistics and scales that are none of the defaults
        model(torch.randn(64, 2, 8, 8).double() + 0.5)
    for norm in (model.norm, model.norms):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return model.eval()


def data(model, many=8, size=40):
    draw = torch.Generator().manual_seed(1)
    shape = (12,) if isinstance(model, nn.Sequential) else (2, 8, 8)
    return [torch.randn(size, *shape, generator=draw, dtype=torch.float64) for _ in range(many)]


def closeness(model, batches):
    """Minus the share of the outputs' variance that a cut model loses."""

    @torch.no_grad()
    def measure(one, judging):
        x = torch.cat(list(judging))
        return -float((one(x) - model(x)).square().mean() / model(x).var(0).mean())

    return measure


def cut(model, workers=WORKERS, drop=0.3, **options):
    batches = data(model)
    return repurpose.cut(model, workers, batches, closeness(model, batches), drop, **options)


def block_diagonal():
    """Four blocks of eight neurons in three layers, all neurons shuffled; a block needs nothing of another."""
    torch.manual_seed(1)
    layers, before = [], torch.arange(32)
    for _ in range(3):
        after = torch.randperm(32)
        layer = nn.Linear(32, 32).double()
        blocks = torch.randn(4, 8, 8).double()
        layer.weight.data = torch.block_diag(*(blocks + blocks.sign() / 2))[after][:, before]
        layers += [layer, nn.ReLU()]
        before = after
    return nn.Sequential(*layers[:-1])
