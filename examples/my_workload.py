"""A workload of one's own: `armillary train examples/my_workload.py --workers 2`.

Ordinary PyTorch that imports nothing of Armillary: a model that guesses the next letter of a text from the last few.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = {"width": 4, "batch_size": 8}  # what `armillary verify` takes
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NextLetter:
    text: str = "the sky is a sphere of rings, and so is the training of a model on many workers. " * 50
    letters: int = 4  # seen before the one to guess
    width: int = 32
    batch_size: int = 32
    steps: int = 200
    name: str = "next_letter"
    unit: str = "letters"

    def model(self) -> nn.Module:
        table = nn.Embedding(128, self.width)
        return nn.Sequential(
            table, nn.Flatten(), nn.Linear(self.letters * self.width, 64), nn.Tanh(), nn.Linear(64, 128)
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=3e-3)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        """Worker w of N takes every N-th of the split's windows, beginning with the w-th."""
        windows = torch.tensor(list(self.text.encode("ascii"))).unfold(0, self.letters + 1, 1)
        cut = len(windows) * 9 // 10
        mine = windows[:cut] if split == "train" else windows[cut:]
        order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))
        share = mine[order[worker : len(order) // workers * workers : workers]]
        for batch in share.split(self.batch_size):
            if len(batch) == self.batch_size or split == "held_out":
                yield batch[:, :-1], batch[:, -1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        letters, following = batch
        return F.cross_entropy(model(letters), following)

    def samples(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        scores = model(batch[0])
        right = (scores.argmax(1) == batch[1]).sum()
        return {"right": float(right), "letters": float(len(scores))}

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        return {"accuracy": totals["right"] / totals["letters"]}


def workload(**options: Any) -> NextLetter:
    return NextLetter(**options)
