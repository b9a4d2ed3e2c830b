"""Parallax's constructed language model: a vocabulary of 15,360 and sequences whose length sets how much of it is read.

A worker draws 128 x length words, all different, so a step reads the share length / 120 of either table, exactly.

Source: Kim et al., Parallax (EuroSys 2019), effect of sparsity. Departures: 64 columns, not 512, and a smaller LSTM,
so that the ranks fit on two cores; a position's score is held against its neighbours' targets instead of as many
sampled words as there are positions, whose matrix of 15,360 x 15,360 scores would be all that is measured: the rows
read are the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SENTENCES, LONGEST = 15_360, 128, 120
SMALL = {"length": 1}
NEIGHBOURS = 8

Batch = tuple[Tensor, Tensor]


class ConstructedModel(nn.Module):
    """Words in, scores of the right word and of its neighbours' out: (positions, 1 + NEIGHBOURS)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width)
        self.outputs = nn.Embedding(VOCABULARY, width)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.inputs(words))
        states = self.projection(states).flatten(0, 1)
        right = self.outputs(targets.flatten())
        return torch.stack([(states * right.roll(by, 0)).sum(1) for by in range(1 + NEIGHBOURS)], dim=1)


@dataclass(frozen=True)
class Constructed:
    """The workload, as `armillary train` takes it. A batch is (words, targets), both (SENTENCES, length) int64."""

    length: int = 30
    width: int = 64
    hidden: int = 32
    learning_rate: float = 0.1
    steps: int = 100
    name: str = "constructed"
    unit: str = "words"
    batch_size: int = SENTENCES

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LONGEST:
            raise ValueError(f"constructed: length is {self.length}, must be 1 to {LONGEST}")

    def model(self) -> ConstructedModel:
        return ConstructedModel(self.width, self.hidden)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        stream = torch.Generator().manual_seed(seed * workers + worker)
        for _ in range(self.steps):
            yield self._words(stream), self._words(stream)

    def _words(self, stream: torch.Generator) -> Tensor:
        """All different, so that a batch reads exactly its share of the table."""
        return torch.randperm(VOCABULARY, generator=stream)[: SENTENCES * self.length].view(SENTENCES, self.length)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(*batch)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))

    def samples(self, batch: Batch) -> int:
        return batch[0].numel()

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        return {"nll": float(self.loss(model, batch)) * batch[0].numel(), "words": float(batch[0].numel())}

    def report(self, totals: dict[str, float]) -> Mapping[str, float]:
        return {"nats_per_word": totals["nll"] / totals["words"]}


def workload(**options: int) -> Constructed:
    return Constructed(**options)  # type: ignore[arg-type]
