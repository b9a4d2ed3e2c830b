"""Rating prediction: a wide hashed table summed by bags, beside a small multi-layer perceptron.

One table holds nearly all parameters and a batch reads few of its rows, through `EmbeddingBag` with offsets:
the shape of click prediction, small. Source: Cheng et al., 2016 (wide and deep), trained by Adagrad as there.
Departure: ratings are predicted with squared error, not clicks.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads import shares
from armillary.workloads.ratings import BAGS, Ratings, latent_factors, movielens

__all__ = ["SMALL", "Recommender", "WideAndDeep", "workload"]

SMALL = {"data": "latent_factors", "rows": 200, "width": 4, "hidden": 8, "batch_size": 8, "learning_rate": 0.1}

Batch = tuple[Tensor, Tensor, Tensor]
HELD_OUT_SHARE = 0.1
DAMPING = 10.0  # imagined average ratings of each user and item in the baseline


class WideAndDeep(nn.Module):
    """Bags of features in, predicted ratings out."""

    def __init__(self, rows: int, width: int, hidden: int, mean: float) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum")
        self.deep = nn.EmbeddingBag(rows, width, mode="sum")
        self.perceptron = nn.Sequential(
            nn.Linear(BAGS * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.head = nn.Linear(hidden, 1)
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.deep.weight, std=0.1 * width**-0.5)
        nn.init.constant_(self.head.bias, mean)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """(ratings,) from `ids` (features,) and `offsets` (BAGS * ratings,), where each bag starts in `ids`."""
        wide: Tensor = self.wide(ids, offsets).view(-1, BAGS).sum(1)
        bags = self.deep(ids, offsets)
        deep: Tensor = self.head(self.perceptron(bags.view(-1, BAGS * bags.shape[1]))).squeeze(1)
        return wide + deep


@dataclass(frozen=True)
class Recommender:
    """The workload. `data` is the path of MovieLens ratings, "latent_factors" (made up), or "movielens" for the set of
    100k inside a wheel in `cache`.

    A batch is (ids, offsets, stars): int64 (features,), int64 (BAGS * batch_size,), float32 (batch_size,).
    """

    data: str = "movielens"
    rows: int = 1_000_000
    width: int = 16
    hidden: int = 64
    batch_size: int = 256
    learning_rate: float = 0.02
    steps: int = 1000
    cache: str = ".cache"
    name: str = "recommender"
    unit: str = "ratings"
    baseline_name: ClassVar[str] = "average deviations of items and users"

    def __post_init__(self) -> None:
        for field in ("rows", "width", "hidden", "batch_size", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"recommender: {field} is {getattr(self, field)}, must be at least 1")

    @functools.cached_property
    def ratings(self) -> Ratings:
        if self.data == "latent_factors":
            return latent_factors(users=20, items=30, ratings=2000, rows=self.rows)
        return movielens(self.cache, self.rows, "" if self.data == "movielens" else str(self.data))

    @property
    def held_out(self) -> int:
        """How many ratings, the first ones, are held out; their order is random."""
        return int(HELD_OUT_SHARE * len(self.ratings.stars))

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """The fewest and the most stars that anybody gave."""
        return float(self.ratings.stars.min()), float(self.ratings.stars.max())

    def model(self) -> WideAndDeep:
        mean = float(self.ratings.stars[self.held_out :].mean())
        return WideAndDeep(self.rows, self.width, self.hidden, mean)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Fused: the table is nearly all the work of a step, and one pass over it beats seven.
        return torch.optim.Adagrad(parameters, self.learning_rate, initial_accumulator_value=1e-3, fused=True)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        first, examples = (
            (self.held_out, len(self.ratings.stars) - self.held_out) if split == "train" else (0, self.held_out)
        )
        for mine in shares.draw(split, examples, self.batch_size, (worker, workers), seed):
            ids, offsets = self.ratings.bags(first + mine)
            stars = self.ratings.stars[first + mine]
            yield torch.from_numpy(ids), torch.from_numpy(offsets), torch.from_numpy(stars)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean squared error in stars."""
        ids, offsets, stars = batch
        predicted = model(ids, offsets)
        return F.mse_loss(predicted, stars.to(predicted))

    def samples(self, batch: Batch) -> int:
        return len(batch[2])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        ids, offsets, stars = batch
        error = model(ids, offsets).clamp(*self.bounds) - stars
        return {
            "squared_error": error.square().sum().item(),
            "absolute_error": error.abs().sum().item(),
            "ratings": float(len(stars)),
        }

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        return {
            "root_mean_squared_error": (totals["squared_error"] / totals["ratings"]) ** 0.5,
            "mean_absolute_error": totals["absolute_error"] / totals["ratings"],
        }

    def baseline(self) -> dict[str, float]:
        """The yardstick: what an item's and then a user's average deviation predict, in the terms of `report`.

        Source: Koren, 2008 (baseline estimates, the decoupled form), deviations damped towards 0.
        """
        data, test, train = self.ratings, slice(0, self.held_out), slice(self.held_out, None)
        stars = data.stars.astype(np.float64)
        guess = np.full(len(stars), stars[train].mean())
        for group in (data.items, data.users):
            count = np.bincount(group[train], minlength=group.max() + 1)
            total = np.bincount(group[train], (stars - guess)[train], minlength=group.max() + 1)
            guess = guess + (total / (count + DAMPING))[group]
        error = (guess.clip(*self.bounds) - stars)[test]
        totals = {"squared_error": (error**2).sum(), "absolute_error": abs(error).sum(), "ratings": len(error)}
        return {name: float(value) for name, value in self.report(totals).items()}


def workload(**options: Any) -> Recommender:
    """The recommender with `options`, fields of Recommender; reads its data, so that errors come early."""
    chosen = Recommender(**options)
    _ = chosen.ratings
    return chosen
