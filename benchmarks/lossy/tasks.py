"""What is trained: a multi-layer perceptron on images, and the recommender, whose tables stay with their owners.

Each is a workload of the package but for its size; --small takes made-up data, to see that everything works.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.session.workload import Workload
from armillary.workloads import recommender, vision

__all__ = ["TASKS", "Task"]

HIDDEN = 1024
ROWS = 100_000  # that MovieLens is hashed into; with a million DDP alone would take nine seconds a step at 100 Mbit/s


@dataclass(frozen=True)
class Task:
    """Args of note:
    workload: small, where the data are -> what is trained.
    by_row: patterns of tables, which coded contenders leave with their owners.
    metric: of `report`, that is compared; more_is_better: or less.
    end: steps of a training that is ended, the learning rate falling to 0; 0: none is.
    """

    workload: Any
    by_row: tuple[str, ...]
    metric: str
    more_is_better: bool
    end: int

    def wishes(self, choice: Any) -> Mapping[str, Any]:
        """Constraints under which everything but tables crosses by that choice."""
        return {"*": choice, **dict.fromkeys(self.by_row, "owned_rows")}


@dataclass(frozen=True)
class Perceptron(vision.Vision):
    """784 - 1024 - 1024 - 10 for Fashion-MNIST, trained by SGD with momentum."""

    hidden: int = HIDDEN

    def model(self) -> nn.Sequential:
        pixels, hidden = self.images.side**2, self.hidden
        return nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, self.images.classes),
        )  # fmt: skip

    def optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate, momentum=0.9)


@functools.cache
def _perceptron(is_small: bool, data: str) -> Workload:
    if is_small:
        return Perceptron(data="patterns", hidden=32, batch_size=8, learning_rate=0.05)
    return Perceptron(data=data or "fashion-mnist", learning_rate=0.02)


@functools.cache
def _recommender(is_small: bool, data: str) -> Workload:
    if is_small:
        return recommender.workload(**recommender.SMALL)
    return recommender.workload(hidden=HIDDEN, rows=ROWS, **({"data": data} if data else {}))


TASKS = {
    "perceptron": Task(_perceptron, (), "accuracy", True, end=6000),  # 25 epochs
    "recommender": Task(_recommender, ("wide.weight", "deep.weight"), "root_mean_squared_error", False, end=0),
}
