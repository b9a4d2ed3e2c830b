"""A word-level language model: LSTM with projection, sampled softmax over a large vocabulary.

Two tables of vocabulary x width hold nearly all its parameters, and a step touches a few per cent of their
rows: the case of Parallax (Kim et al., EuroSys 2019), whose LM1B workload this is on a small scale
(Jozefowicz et al., 2016). Perplexity on held-out text is taken with the full softmax. Departure: the
projection feeds the output alone and not the recurrence, which keeps torch's fused LSTM kernel on a CPU.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads import shares
from armillary.workloads import text as bigram
from armillary.workloads.text import Corpus, load, synthetic

__all__ = ["SMALL", "LanguageModel", "SampledSoftmaxLSTM", "expected_counts", "log_uniform", "workload"]

SMALL = {
    "corpus": "synthetic",
    "vocabulary": 60,
    "width": 8,
    "hidden": 12,
    "length": 5,
    "batch_size": 4,
    "negatives": 16,
    "accumulator": 0.1,
}

Batch = tuple[Tensor, Tensor, Tensor]
POSITIONS = 512  # scored at once by the full softmax: bounds the logits to POSITIONS x vocabulary


class SampledSoftmaxLSTM(nn.Module):
    """Words in, scores of the right word and of sampled wrong ones out."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width, bias=False)
        self.output = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        nn.init.normal_(self.output, std=width**-0.5)

    def forward(self, words: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Scores (positions, 1 + negatives); column 0 is the target's.

        `words` and `targets` are (sequences, length), `negatives` (negatives,) are shared by all positions.
        A negative's score is lowered by the log of its expected count, so that the sum over the negatives
        estimates the sum over all wrong words without bias; one that hits the target is taken out.

        Source: Bengio & Senecal, 2003 (importance sampling); Jean et al., 2015 (shared samples).
        Departure from the latter: the target is certain to be there, so its score is not corrected.
        """
        hidden = self.hidden(words)
        right = targets.flatten()
        score = (hidden * F.embedding(right, self.output)).sum(1) + self.bias.index_select(0, right)
        shift = self.bias.index_select(0, negatives) - log_expected(negatives, self.vocabulary).to(hidden)
        others = torch.addmm(shift, hidden, F.embedding(negatives, self.output).t())
        others = others.masked_fill(negatives == right[:, None], -torch.inf)
        return torch.cat([score[:, None], others], dim=1)

    def hidden(self, words: Tensor) -> Tensor:
        """The state after each word, (positions, width); every sequence starts from zero state."""
        states, _ = self.lstm(self.embedding(words))
        projected: Tensor = self.projection(states.flatten(0, 1))
        return projected


def log_uniform(count: int, vocabulary: int, rng: np.random.Generator) -> Tensor:
    """Draws `count` ids with replacement, id k with probability log((k + 2) / (k + 1)) / log(V + 1).

    For a vocabulary ranked by frequency this follows Zipf's law closely.
    """
    ids = np.exp(rng.random(count) * np.log(vocabulary + 1)).astype(np.int64) - 1
    return torch.from_numpy(ids.clip(0, vocabulary - 1))


def expected_counts(ids: Tensor, count: int, vocabulary: int) -> Tensor:
    """How often each of `ids` comes up in `count` draws of `log_uniform`, in float64."""
    rank = ids.double()
    return ((rank + 2) / (rank + 1)).log() * (count / math.log(vocabulary + 1))


def log_expected(negatives: Tensor, vocabulary: int) -> Tensor:
    return expected_counts(negatives, len(negatives), vocabulary).log()


@dataclass(frozen=True)
class LanguageModel:
    """The workload. `corpus` is "stdlib", "synthetic" or the path of a text file or folder.

    A batch is (words, targets, negatives): two of (batch_size, length) and one of (negatives,), all int64. Held-out
    batches are of windows from all over the text, in an order that is always the same, so that a few stand for all.
    """

    corpus: str = "stdlib"
    vocabulary: int = 0  # of the synthetic text only
    min_count: int = 5
    width: int = 128
    hidden: int = 256
    length: int = 24
    batch_size: int = 64
    negatives: int = 1024
    learning_rate: float = 0.2
    accumulator: float = 1e-3  # of squared gradients, at the start of Adagrad
    steps: int = 2400
    cache: str = ".cache"
    name: str = "language_model"
    unit: str = "words"
    baseline_name: ClassVar[str] = "a smoothed bigram model"

    def __post_init__(self) -> None:
        for field in ("min_count", "width", "hidden", "length", "batch_size", "negatives", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"language_model: {field} is {getattr(self, field)}, must be at least 1")

    @functools.cached_property
    def text(self) -> Corpus:
        if self.corpus == "synthetic":
            return synthetic(self.vocabulary, length=20_000)
        return load(self.corpus, self.min_count, self.cache)

    def model(self) -> SampledSoftmaxLSTM:
        return SampledSoftmaxLSTM(self.text.vocabulary, self.width, self.hidden)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Fused: the tables are nearly all the work of a step, and one pass over them beats seven.
        start = self.accumulator
        return torch.optim.Adagrad(parameters, self.learning_rate, initial_accumulator_value=start, fused=True)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        stream = self.text.train if split == "train" else self.text.held_out
        examples = (len(stream) - 1) // self.length
        offsets = np.arange(self.length + 1)  # windows share their border: each token is a target once
        shared = shares.draw(split, examples, self.batch_size, (worker, workers), seed)
        order = np.arange(examples) if split == "train" else shares.shuffled(examples, seed=0)
        for step, mine in enumerate(shared):
            window = torch.from_numpy(stream[order[mine][:, None] * self.length + offsets].astype(np.int64))
            rng = np.random.default_rng((seed, worker, step))
            negatives = log_uniform(self.negatives, self.text.vocabulary, rng)
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous(), negatives

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over the positions of the sampled softmax's cross entropy, in nats."""
        scores = model(*batch)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))

    def samples(self, batch: Batch) -> int:
        return batch[1].numel()

    def evaluate(self, model: SampledSoftmaxLSTM, batch: Batch) -> dict[str, float]:
        """Full softmax over the vocabulary: summed negative log-likelihood (nats) and words."""
        words, targets, _ = batch
        nll = 0.0
        hidden, right = model.hidden(words), targets.flatten()
        for start in range(0, len(right), POSITIONS):
            some = slice(start, start + POSITIONS)
            scores = F.linear(hidden[some], model.output, model.bias)
            nll += F.cross_entropy(scores, right[some], reduction="sum").item()
        return {"nll": nll, "words": float(targets.numel())}

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        nats = totals["nll"] / totals["words"]
        return {"nats_per_word": nats, "perplexity": math.exp(nats)}

    def baseline(self) -> dict[str, float]:
        """The yardstick: a smoothed bigram model on the same held-out words, in the terms of `report`."""
        nats = bigram.cross_entropy(self.text.train, self.text.held_out, self.text.vocabulary)
        return {"nats_per_word": nats, "perplexity": math.exp(nats)}


def workload(**options: Any) -> LanguageModel:
    """The language model with `options`, fields of LanguageModel; reads its text, so errors come early."""
    chosen = LanguageModel(**options)
    _ = chosen.text
    return chosen
