"""Translation: an encoder and a decoder with attention, two embedding tables, a dense softmax.

A mix of sparse and dense parameters of similar size: the GNMT case of Parallax (Kim et al., EuroSys 2019) on
a small scale. The model is that of Luong et al., 2015 ("general" attention), with a bidirectional encoder.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads import parallel_text as bleu
from armillary.workloads import shares
from armillary.workloads.parallel_text import BEGIN, END, PAD, UNKNOWN, ParallelText, libreoffice, reversed_words

__all__ = ["SMALL", "AttentionTranslator", "Translation", "workload"]

SMALL = {"language": "reversed", "longest": 5, "width": 8, "hidden": 8, "batch_size": 4, "learning_rate": 0.02}

Batch = tuple[Tensor, Tensor]


class AttentionTranslator(nn.Module):
    """Source words and the target so far in, scores of each next target word out."""

    def __init__(self, source_vocabulary: int, target_vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source_vocabulary, width)
        self.target = nn.Embedding(target_vocabulary, width)
        self.forwards = nn.GRU(width, hidden, batch_first=True)
        self.backwards = nn.GRU(width, hidden, batch_first=True)
        self.memory = nn.Linear(2 * hidden, hidden, bias=False)
        self.decoder = nn.GRU(width, hidden, batch_first=True)
        self.mix = nn.Linear(2 * hidden, width)
        self.output = nn.Linear(width, target_vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(pairs, target length, target vocabulary) scores of the word after each of `target`."""
        memory, state = self.encode(source)
        scores, _ = self.decode(memory, source, target, state)
        return scores

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Memory (pairs, source length, hidden) and the decoder's first state (1, pairs, hidden).

        Padding touches neither: the backward direction reads each sentence reversed within its own length.
        """
        position = torch.arange(source.shape[1], device=source.device)
        length = (source != PAD).sum(1, keepdim=True)
        turned = torch.where(position < length, length - 1 - position, position)
        ahead, _ = self.forwards(self.source(source))
        back, _ = self.backwards(self.source(source.gather(1, turned)))
        back = back.gather(1, turned[:, :, None].expand_as(back))
        memory = self.memory(torch.cat([ahead, back], dim=2))
        state = back[:, 0] + ahead.gather(1, (length - 1)[:, :, None].expand(-1, 1, ahead.shape[2]))[:, 0]
        return memory, state[None].tanh()

    def decode(self, memory: Tensor, source: Tensor, target: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Scores after each word of `target`, and the state to go on from."""
        states, last = self.decoder(self.target(target), state)
        weights = (states @ memory.transpose(1, 2)).masked_fill((source == PAD)[:, None], -torch.inf)
        context = weights.softmax(2) @ memory
        mixed = self.mix(torch.cat([states, context], dim=2)).tanh()
        return self.output(mixed), last


def greedy(model: AttentionTranslator, source: Tensor) -> list[list[int]]:
    """The likeliest word after word, until END or twice as many words as the sentence has and five."""
    limits = (2 * (source != PAD).sum(1) + 5).tolist()  # each its own, whatever sentences share its batch
    memory, state = model.encode(source)
    word = torch.full_like(source[:, :1], BEGIN)
    said: list[Tensor] = []
    done = torch.zeros_like(word, dtype=torch.bool)
    while len(said) < max(limits) and not done.all():
        scores, state = model.decode(memory, source, word, state)
        word = scores.argmax(2)
        done = done | (word == END)
        said.append(word)
    rows = torch.cat(said, dim=1).tolist()
    return [upto_end(row[:limit]) for row, limit in zip(rows, limits, strict=True)]


def upto_end(row: list[int]) -> list[int]:
    return row[: row.index(END)] if END in row else row


@dataclass(frozen=True)
class Translation:
    """The workload. `language` is "reversed" (made up) or one of LibreOffice's help, such as "de" or "fr".

    A batch is (source, target), int64 of (batch_size, longest in the batch), as in `Pairs`. The pairs of a
    global batch are of similar length.
    """

    language: str = "de"
    min_count: int = 3
    longest: int = 40  # tokens of a sentence; longer pairs are left out
    width: int = 128
    hidden: int = 192
    batch_size: int = 64
    learning_rate: float = 2e-3
    steps: int = 1200
    cache: str = ".cache"
    name: str = "translation"
    unit: str = "pairs"

    def __post_init__(self) -> None:
        for field in ("min_count", "longest", "width", "hidden", "batch_size", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"translation: {field} is {getattr(self, field)}, must be at least 1")

    @functools.cached_property
    def text(self) -> ParallelText:
        if self.language == "reversed":
            return reversed_words(words=12, pairs=2000, longest=self.longest)
        return libreoffice(self.language, self.longest, self.min_count, self.cache)

    def model(self) -> AttentionTranslator:
        sizes = len(self.text.source_words), len(self.text.target_words)
        return AttentionTranslator(*sizes, self.width, self.hidden)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.learning_rate, fused=True)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        pairs = self.text.train if split == "train" else self.text.held_out
        place = worker, workers
        if split == "train":
            lengths = (pairs.source != PAD).sum(1)
            order = shares.alike(lengths, self.batch_size * workers, seed)
            drawn = shares.train_share(order, self.batch_size, place)
        else:
            drawn = shares.draw(split, len(pairs), self.batch_size, place, seed)
        for mine in drawn:
            yield trimmed(pairs.source[mine]), trimmed(pairs.target[mine])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over a sentence and averaged over the pairs.

        An average over words would weigh a worker's words by how few it drew; this one does not.
        """
        source, target = batch
        return summed_nll(model(source, target[:, :-1]), target) / len(source)

    def samples(self, batch: Batch) -> int:
        return len(batch[0])

    def evaluate(self, model: AttentionTranslator, batch: Batch) -> dict[str, float]:
        """Sums of the negative log-likelihood (nats), its tokens, and BLEU's counts under greedy decoding."""
        source, target = batch
        nll = summed_nll(model(source, target[:, :-1]), target).item()
        said = greedy(model, source)
        pairs = zip(said, target[:, 1:].tolist(), strict=True)
        found = [bleu.counts(hypothesis, upto_end(row), never=UNKNOWN) for hypothesis, row in pairs]
        sums = {name: sum(counts[name] for counts in found) for name in found[0]}
        return {"nll": nll, "tokens": float((target[:, 1:] != PAD).sum()), **sums}

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        nats = totals["nll"] / totals["tokens"]
        return {"nats_per_word": nats, "perplexity": float(np.exp(nats)), "bleu": bleu.score(totals)}


def trimmed(rows: Any) -> Tensor:
    """Without the columns that are padding in every row."""
    longest = int((rows != PAD).sum(1).max())
    return torch.from_numpy(rows[:, :longest].astype(np.int64))


def summed_nll(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def workload(**options: Any) -> Translation:
    """The translation workload with `options`, fields of Translation; reads its text, so errors come early."""
    chosen = Translation(**options)
    _ = chosen.text
    return chosen
