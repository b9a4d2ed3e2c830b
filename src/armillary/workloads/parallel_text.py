"""Pairs of sentences that say the same in two languages, as ids, and the corpus BLEU of a translation.

The real pairs are the paragraphs of LibreOffice's help, which carry the same ids in every language; Debian packages it
per language. Some 36,000 pairs English-German are left once untranslated and repeated ones go.

Source: BLEU of Papineni et al., ACL 2002, n-grams up to 4 with the brevity penalty, one reference, from sums that add
up over batches and workers. It is taken over the workload's own tokens, so its values compare between runs of one
workload only.
"""

import html
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.workloads.shares import Arrays, fingerprint, joined, kept, parted
from armillary.workloads.text import tokens

__all__ = [
    "BEGIN",
    "END",
    "ORDERS",
    "PAD",
    "UNKNOWN",
    "Pairs",
    "ParallelText",
    "counts",
    "libreoffice",
    "reversed_words",
    "score",
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
