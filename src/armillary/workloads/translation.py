"""Translation: an encoder and a decoder with attention, two embedding tables, a dense softmax; pairs, and their BLEU.

A mix of sparse and dense parameters of similar size: the GNMT case of Parallax (Kim et al., EuroSys 2019) on a small
scale. The model is that of Luong et al., 2015 ("general" attention), with a bidirectional encoder.

The pairs of sentences are the paragraphs of LibreOffice's help, which carry the same ids in every language; Debian
packages it per language. Some 36,000 pairs English-German are left once untranslated and repeated ones go.

Source: BLEU of Papineni et al., ACL 2002, n-grams up to 4 with the brevity penalty, one reference, from sums that add
up over batches and workers. It is taken over the workload's own tokens, so its values compare between runs of one
workload only.
"""

import functools
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from armillary.workloads import shares
from armillary.workloads.shares import Arrays, fingerprint, joined, kept, parted
from armillary.workloads.text import tokens

__all__ = [
    "BEGIN",
    "END",
    "ORDERS",
    "PAD",
    "SMALL",
    "UNKNOWN",
    "AttentionTranslator",
    "Pairs",
    "ParallelText",
    "Translation",
    "counts",
    "libreoffice",
    "reversed_words",
    "score",
    "workload",
]

ORDERS = (1, 2, 3, 4)


def counts(hypothesis: Sequence[int], reference: Sequence[int], never: int) -> dict[str, float]:
    """Matched and all n-grams of one hypothesis, and both lengths; a token equal to `never` matches nothing."""
    sums = {"hypothesis_length": float(len(hypothesis)), "reference_length": float(len(reference))}
    for order in ORDERS:
        said, wanted = ngrams(hypothesis, order), ngrams(reference, order)
        known = {gram: count for gram, count in said.items() if never not in gram}
        sums[f"matches_{order}"] = float(sum(min(count, wanted[gram]) for gram, count in known.items()))
        sums[f"ngrams_{order}"] = float(sum(said.values()))
    return sums


def score(sums: dict[str, float]) -> float:
    """BLEU in 0 to 1 from summed `counts`; 0 if some order has no match."""
    if any(sums[f"matches_{order}"] == 0 for order in ORDERS):
        return 0.0
    logs = [math.log(sums[f"matches_{order}"] / sums[f"ngrams_{order}"]) for order in ORDERS]
    brevity = min(0.0, 1 - sums["reference_length"] / sums["hypothesis_length"])
    return math.exp(brevity + sum(logs) / len(ORDERS))


def ngrams(tokens: Sequence[int], order: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))


PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
SPECIAL = ("<pad>", "<unk>", "<begin>", "<end>")
HELP = Path("/usr/share/libreoffice/help")
PARAGRAPH = re.compile(r'<(p|h[1-6]|td|li)\b[^>]*\bid="([^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")
HELD_OUT_EVERY = 50
LAYOUT = 1  # part of the cache key: change it with anything that changes the ids

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Row i of `target` translates row i of `source`. Rows end in END, then PAD; those of `target` start
    with BEGIN."""

    source: Ids  # (pairs, longest source)
    target: Ids  # (pairs, longest target)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(f"{len(self.source)} sources but {len(self.target)} targets")

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, eq=False)
class ParallelText:
    """Training and held-out pairs. Words of each language are ranked by frequency in train, after SPECIAL."""

    train: Pairs
    held_out: Pairs
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]


def libreoffice(language: str, longest: int, min_count: int, cache: str) -> ParallelText:
    """Pairs from English to `language` of at most `longest` tokens a side; words seen fewer than `min_count`
    times in train are UNKNOWN. Every fiftieth pair is held out.

    Raises ValueError with the command that installs the text if it is not there.
    """
    sides = [HELP / "en-US", HELP / language]
    files = [sorted((side / "text").rglob("*.html")) for side in sides]
    if not all(files):
        wanted = " ".join(f"libreoffice-help-{name.lower()}" for name in ("en-us", language))
        missing = " and ".join(str(side) for side, found in zip(sides, files, strict=True) if not found)
        raise ValueError(f"no help pages in {missing}; run: apt-get install {wanted}")
    key = fingerprint(files[0] + files[1], LAYOUT, longest, min_count)
    path = Path(cache) / "parallel_text" / f"{language}-{key}.npz"
    arrays = kept(path, lambda: as_arrays(number(pairs_of(*map(paragraphs, sides)), longest, min_count)))
    return ParallelText(
        Pairs(arrays["train_source"], arrays["train_target"]),
        Pairs(arrays["held_out_source"], arrays["held_out_target"]),
        parted(arrays["source_words"]),
        parted(arrays["target_words"]),
    )


def paragraphs(root: Path) -> dict[tuple[str, str], str]:
    """The help's texts by page and paragraph id, without markup."""
    found = {}
    for path in sorted((root / "text").rglob("*.html")):
        page = path.read_text(encoding="utf-8", errors="replace")
        for match in PARAGRAPH.finditer(page):
            text = " ".join(html.unescape(TAG.sub("", match[3])).split())
            if text:
                found[str(path.relative_to(root)), match[2]] = text
    return found


def pairs_of(source: dict[tuple[str, str], str], target: dict[tuple[str, str], str]) -> list[tuple[str, str]]:
    """What both sides have under one id; the untranslated and repeated sources are left out."""
    found = {text: target[key] for key, text in source.items() if key in target and target[key] != text}
    return list(found.items())


def number(pairs: list[tuple[str, str]], longest: int, min_count: int) -> ParallelText:
    """Spells the pairs in ids."""
    spelled = [(tokens(source), tokens(target)) for source, target in pairs]
    spelled = [pair for pair in spelled if all(0 < len(side) <= longest for side in pair)]
    held_out = spelled[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [pair for i, pair in enumerate(spelled) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    if not train or not held_out:
        raise ValueError(f"{len(spelled)} pairs of at most {longest} tokens are too few; raise `longest`")
    words = [vocabulary([pair[side] for pair in train], min_count) for side in (0, 1)]
    ids = [{word: i for i, word in enumerate(side)} for side in words]

    def matrices(split: list[tuple[list[str], list[str]]]) -> Pairs:
        source = [[ids[0].get(word, UNKNOWN) for word in pair[0]] + [END] for pair in split]
        target = [[BEGIN, *(ids[1].get(word, UNKNOWN) for word in pair[1]), END] for pair in split]
        return Pairs(padded(source), padded(target))

    return ParallelText(matrices(train), matrices(held_out), words[0], words[1])


def vocabulary(sentences: list[list[str]], min_count: int) -> tuple[str, ...]:
    counts = Counter(word for sentence in sentences for word in sentence)
    return (*SPECIAL, *(word for word, count in counts.most_common() if count >= min_count))


def padded(rows: list[list[int]]) -> Ids:
    matrix = np.full((len(rows), max(map(len, rows))), PAD, dtype=np.int32)
    for row, ids in zip(matrix, rows, strict=True):
        row[: len(ids)] = ids
    return matrix


def as_arrays(text: ParallelText) -> Arrays:
    return {
        "train_source": text.train.source,
        "train_target": text.train.target,
        "held_out_source": text.held_out.source,
        "held_out_target": text.held_out.target,
        "source_words": joined(text.source_words),
        "target_words": joined(text.target_words),
    }


def reversed_words(words: int, pairs: int, longest: int) -> ParallelText:
    """A made-up language, which says everything backwards: learnable, and it needs attention."""
    rng = np.random.default_rng(0)

    def some(count: int) -> Pairs:
        lengths = rng.integers(1, longest + 1, size=count)
        said = [rng.integers(len(SPECIAL), len(SPECIAL) + words, size=length).tolist() for length in lengths]
        return Pairs(padded([[*row, END] for row in said]), padded([[BEGIN, *reversed(row), END] for row in said]))

    spelled = (*SPECIAL, *(f"w{i}" for i in range(words)))
    return ParallelText(some(pairs), some(max(1, pairs // 10)), spelled, spelled)


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
        found = [counts(hypothesis, upto_end(row), never=UNKNOWN) for hypothesis, row in pairs]
        sums = {name: sum(counts[name] for counts in found) for name in found[0]}
        return {"nll": nll, "tokens": float((target[:, 1:] != PAD).sum()), **sums}

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        nats = totals["nll"] / totals["tokens"]
        return {"nats_per_word": nats, "perplexity": float(np.exp(nats)), "bleu": score(totals)}


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
