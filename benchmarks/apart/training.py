"""One training of a net: end to end, or in parts on synthetic labels, with the controls beside it."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary import local_losses
from benchmarks.local_losses.nets import Data, accuracy, batches, data, loss, resnet20

__all__ = ["NETS", "WAYS", "perceptron", "trained"]

RECOVERY = 2  # epochs
CLASSES = 10
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Net:
    """at: where its parts begin. plateau: epochs of end-to-end training after which it gains no more."""

    make: Callable[[int], nn.Sequential]
    at: tuple[str, ...]
    images: int
    epochs: int
    plateau: int
    controls: bool = True

    def has(self, way: str) -> bool:
        return self.controls or way not in CONTROLS


def perceptron(seed: int) -> nn.Sequential:
    """Six layers: 256-128-128-128-128-128-10."""
    torch.manual_seed(seed)
    hidden = [nn.Sequential(nn.Linear(before, 128), nn.ReLU()) for before in (256, 128, 128, 128, 128)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, CLASSES))


NETS: Mapping[str, Net] = {
    "perceptron in 2": Net(perceptron, ("4",), 10_000, 8, 16),
    "perceptron in 3": Net(perceptron, ("3", "5"), 10_000, 8, 16),
    "ResNet-20-shaped in 2": Net(resnet20, ("layer2",), 4000, 3, 9, controls=False),
}
CONTROLS = ("codes drawn anew", "labels permuted", "lower part alone")


def trained(net: str, way: str, seed: int, is_small: bool) -> Mapping[str, Any]:
    torch.set_num_threads(1)
    one = NETS[net]
    train, test = data("train", 256 if is_small else one.images), data("test", 500 if is_small else 5000)
    model, epochs = one.make(seed), 1 if is_small else one.epochs
    made: float | None = WAYS[way](model, one, seed, train, test, epochs)
    return {"accuracy": accuracy(model, test) if made is None else made}


@dataclass(frozen=True)
class Loader:
    """One order a pass. All passes of a run differ."""

    train: Data
    seed: int
    first: int = 0

    def epochs(self, count: int) -> Iterable[Batch]:
        for epoch in range(count):
            yield from batches(self.train, self.seed, self.first + epoch)


@dataclass
class Shuffled:
    """A loader that gives another order each time, as a DataLoader with shuffle does."""

    train: Data
    seed: int
    passes: int = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(batches(self.train, self.seed, self.passes - 1))


def _ordinary(model: nn.Module, given: Iterable[Batch]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in given:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def _end_to_end(model: nn.Sequential, net: Net, seed: int, train: Data, test: Data, epochs: int) -> None:
    _ordinary(model, Loader(train, seed).epochs(net.plateau if epochs == net.epochs else epochs))


def _recovery_alone(model: nn.Sequential, net: Net, seed: int, train: Data, test: Data, epochs: int) -> None:
    _ordinary(model, Loader(train, seed, 100).epochs(RECOVERY))


def _apart(
    model: nn.Sequential, net: Net, seed: int, train: Data, test: Data, epochs: int,
    recovery: int = 0, concurrent: bool = False, permuted: bool = False,
) -> None:  # fmt: skip
    loader: Any = Shuffled(train, seed)
    if permuted:
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
        loader = Shuffled(Data(train.images, train.labels[order]), seed)
    example = next(iter(batches(train, seed, 0)))
    parts = local_losses.apart(
        model,
        loss,
        example,
        at=net.at,
        classes=CLASSES,
        labels=lambda batch: batch[1],
        seed=seed,
        concurrent=concurrent,
    )
    for part in parts:
        optimizer = torch.optim.Adam(part.parameters(), 1e-3)
        for given in part.batches(loader, epochs=epochs):
            optimizer.zero_grad()
            part.loss(given).backward()
            optimizer.step()
    if recovery:
        _ordinary(model, Loader(train, seed, 100).epochs(recovery))


def _drawn_anew(model: nn.Sequential, net: Net, seed: int, train: Data, test: Data, epochs: int) -> None:
    """By hand: each step of a lower part has codes of its own. The last part learns on what comes."""
    cuts = [int(point) for point in net.at]
    edges = [0, *cuts, len(model)]
    draw = torch.Generator().manual_seed(seed)
    lower = nn.Sequential()
    for first, end in itertools.pairwise(edges):
        part = model[first:end]
        optimizer = torch.optim.Adam(part.parameters(), 1e-3)
        for x, y in Loader(train, seed).epochs(epochs):
            with torch.no_grad():
                x = lower(x)
            optimizer.zero_grad()
            output = part(x)
            if end < len(model):
                F.mse_loss(output, torch.rand(CLASSES, 128, generator=draw)[y]).backward()
            else:
                F.cross_entropy(output, y).backward()
            optimizer.step()
        lower = model[:end]


def _lower_alone(model: nn.Sequential, net: Net, seed: int, train: Data, test: Data, epochs: int) -> float:
    """The class whose code is nearest to what the lowest part gives."""
    example = next(iter(batches(train, seed, 0)))
    options = {"classes": CLASSES, "labels": lambda batch: batch[1], "seed": seed}
    part = local_losses.apart(model, loss, example, at=net.at, **options)[0]
    optimizer = torch.optim.Adam(part.parameters(), 1e-3)
    for given in part.batches(Shuffled(train, seed), epochs=epochs):
        optimizer.zero_grad()
        part.loss(given).backward()
        optimizer.step()
    assert part.codes is not None
    with torch.no_grad():
        nearest = torch.cdist(part(test.images).flatten(1), part.codes.T).argmin(1)
    return 100 * float((nearest == test.labels).float().mean())


WAYS: Mapping[str, Any] = {
    "end to end": _end_to_end,
    "apart": _apart,
    "apart, 2 epochs of recovery": partial(_apart, recovery=RECOVERY),
    "recovery alone": _recovery_alone,
    "apart, concurrent": partial(_apart, concurrent=True),
    "apart, concurrent, 2 epochs of recovery": partial(_apart, concurrent=True, recovery=RECOVERY),
    "codes drawn anew": _drawn_anew,
    "labels permuted": partial(_apart, permuted=True),
    "lower part alone": _lower_alone,
}
