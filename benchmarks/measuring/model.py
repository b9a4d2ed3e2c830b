"""The model of the benchmark: an LSTM language model with two large tables, in plain PyTorch.

Its tables hold nearly all parameters and are read by row, the input words in one, the targets and the
sampled negatives in the other, which is the case Parallax was made for. Words follow Zipf's law, so ranks
meet in the frequent rows and miss each other in the rare ones.

Source: Kim et al., Parallax, EuroSys 2019, LM on One Billion Words (LSTM with projection, sampled softmax:
Jozefowicz et al., 2016). Departures: a small LSTM, so that 8 ranks fit on 2 cores and tables decide;
uniform-in-log random words in place of text; sampled logits are not corrected for how often a word is drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """How large the model and one rank's batch are; all counts."""

    vocabulary: int = 400_000
    features: int = 256  # columns of both tables
    hidden: int = 64
    projection: int = 32
    sentences: int = 32  # of one rank
    words: int = 20  # predicted in each sentence
    negatives: int = 2048  # drawn anew for each batch, shared by its words

    def __post_init__(self) -> None:
        wrong = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) < 1}
        if wrong or self.vocabulary < 2 or self.projection >= self.hidden:
            raise ValueError(
                f"model: sizes must be at least 1, vocabulary 2, projection under hidden, got {wrong or self}"
            )

    @property
    def table_bytes(self) -> int:
        """Of both tables together."""
        return 2 * self.vocabulary * self.features * FLOAT_BYTES


class LanguageModel(nn.Module):
    """Words and negatives in, mean sampled-softmax loss out.

    Args:
        sizes: see `Sizes`.
        sparse: how the tables' gradients come: as the rows that were read, or as whole tables of mostly zeros.
    """

    def __init__(self, sizes: Sizes, sparse: bool) -> None:
        super().__init__()
        self.features = sizes.features
        self.inputs = nn.Embedding(sizes.vocabulary, sizes.features, sparse=sparse)
        self.lstm = nn.LSTM(sizes.features, sizes.hidden, proj_size=sizes.projection, batch_first=True)
        self.widen = nn.Linear(sizes.projection, sizes.features)
        self.outputs = nn.Embedding(sizes.vocabulary, sizes.features, sparse=sparse)

    def forward(self, sentences: Tensor, negatives: Tensor) -> Tensor:
        """
        Args:
            sentences: (sentences, words + 1) int64; each word predicts the next.
            negatives: (negatives,) int64.
        """
        states, _ = self.lstm(self.inputs(sentences[:, :-1]))
        states = self.widen(states).reshape(-1, self.features)
        targets = sentences[:, 1:].reshape(-1)
        rows = self.outputs(torch.cat([targets, negatives]))  # one lookup, so that repeats can be merged
        of_targets, of_negatives = rows[: len(targets)], rows[len(targets) :]
        logits = torch.cat([(states * of_targets).sum(-1, keepdim=True), states @ of_negatives.T], dim=1)
        return nn.functional.cross_entropy(logits, targets.new_zeros(len(targets)))


def seeded_model(sizes: Sizes, sparse: bool) -> LanguageModel:
    """The same model on every rank and in every mode; the caller's random stream is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(sizes, sparse)


def batches(sizes: Sizes, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's endless batches, the same in every mode: (sentences, words + 1) and (negatives,), int64."""
    stream = torch.Generator().manual_seed(rank)
    while True:
        sentences = _frequent_first(sizes.vocabulary, (sizes.sentences, sizes.words + 1), stream)
        yield sentences, _frequent_first(sizes.vocabulary, (sizes.negatives,), stream)


def _frequent_first(vocabulary: int, shape: tuple[int, ...], stream: torch.Generator) -> Tensor:
    """Word ids from 1 with P(id = k) proportional to log(1 + 1/k): Zipf's law with exponent 1."""
    return (vocabulary ** torch.rand(shape, generator=stream)).long().clamp(max=vocabulary - 1)
