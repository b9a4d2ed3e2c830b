"""Text as ids: files are read, cut into tokens, numbered by frequency and split into train and held-out.

The default text is the Python standard library's own source: some thirty megabytes that every machine running this
already has, with a long-tailed vocabulary. Any file or folder of text (plain or .gz) serves too. The ids are kept in a
cache folder, so several workers which start at once tokenise only once.

A smoothed bigram model is the yardstick that a neural language model must beat. Source: Kneser & Ney, 1995,
interpolated form of Chen & Goodman, 1999 (one discount, n1 / (n1 + 2 n2)). Departure: the unigram level is itself
interpolated with the uniform distribution, so every word has a probability.
"""

import gzip
import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.workloads.shares import Arrays, fingerprint, joined, kept, parted

__all__ = [
    "END_OF_LINE",
    "UNKNOWN",
    "Bigram",
    "Corpus",
    "count",
    "cross_entropy",
    "load",
    "probabilities",
    "synthetic",
    "tokens",
]

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bigram:
    """Counts of a text: pairs sorted by key = previous * vocabulary + next, and sums over them."""

    vocabulary: int
    keys: NDArray[np.int64]  # (distinct pairs,)
    pairs: NDArray[np.int64]  # (distinct pairs,) how often each came up
    totals: NDArray[np.int64]  # (vocabulary,) how often each word was a previous one
    kinds: NDArray[np.int64]  # (vocabulary,) how many distinct words followed it
    fallback: Floats  # (vocabulary,) the lower-order distribution
    discount: float


def count(text: Ids, vocabulary: int) -> Bigram:
    """Counts the pairs of `text`; ids must be below `vocabulary`."""
    seen = text[:-1].astype(np.int64) * vocabulary + text[1:]
    keys, pairs = np.unique(seen, return_counts=True)
    previous, following = np.divmod(keys, vocabulary)
    return Bigram(
        vocabulary,
        keys,
        pairs,
        totals=np.bincount(text[:-1], minlength=vocabulary),
        kinds=np.bincount(previous, minlength=vocabulary),
        fallback=continuation(np.bincount(following, minlength=vocabulary)),
        discount=discount_of(pairs),
    )


def discount_of(counts: NDArray[np.int64]) -> float:
    """n1 / (n1 + 2 n2), n1 and n2 being how many things were counted once and twice; 0.5 if undefined."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once and twice else 0.5


def continuation(histories: NDArray[np.int64]) -> Floats:
    """How likely a word is to follow a new history: by the number of distinct words it has followed."""
    discount = discount_of(histories)
    kept = np.maximum(histories - discount, 0)
    spare = histories.sum() - kept.sum()
    shares: Floats = (kept + spare / len(histories)) / histories.sum()
    return shares


def probabilities(model: Bigram, previous: Ids, following: Ids) -> Floats:
    """P(following | previous), element by element; a history never seen falls back wholly."""
    keys = previous.astype(np.int64) * model.vocabulary + following
    at = np.searchsorted(model.keys, keys).clip(max=len(model.keys) - 1)
    pairs = np.where(model.keys[at] == keys, model.pairs[at], 0)
    totals = np.maximum(model.totals[previous], 1)
    spare = np.where(model.totals[previous] > 0, model.discount * model.kinds[previous] / totals, 1.0)
    found: Floats = np.maximum(pairs - model.discount, 0) / totals + spare * model.fallback[following]
    return found


def cross_entropy(train: Ids, held_out: Ids, vocabulary: int) -> float:
    """Nats per word of `held_out`, its first word apart, under a bigram model of `train`."""
    found = probabilities(count(train, vocabulary), held_out[:-1], held_out[1:])
    return float(-np.log(found).mean())


UNKNOWN, END_OF_LINE = 0, 1
SPECIAL = ["<unk>", "\n"]
# A newline counts once however many blank lines follow it.
TOKEN = re.compile(r"[^\W\d]\w*|\d+|\n(?!\s*\n)|[^\w\s]")
HELD_OUT_EVERY = 50  # one document in fifty, two per cent
LAYOUT = "1"  # part of the cache key: change it with TOKEN, HELD_OUT_EVERY or the file's layout


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two streams of ids in reading order, and what they mean.

    Ids are ranked by frequency in train: id 0 is any word seen too rarely, 1 the end of a line, 2 the most
    frequent word. Held-out text takes no part in the choice of the vocabulary.
    """

    train: NDArray[np.int32]  # (tokens,)
    held_out: NDArray[np.int32]  # (tokens,)
    words: tuple[str, ...]  # (vocabulary,)

    def __post_init__(self) -> None:
        if len(self.train) < 2 or len(self.held_out) < 2:
            raise ValueError(
                f"the corpus has {len(self.train)} training and {len(self.held_out)} held-out tokens; pass more text"
            )

    @property
    def vocabulary(self) -> int:
        return len(self.words)


def load(corpus: str, min_count: int, cache: str) -> Corpus:
    """Reads `corpus` ("stdlib", or the path of a file or folder), from `cache` if it was read before.

    Words seen fewer than `min_count` times in train become UNKNOWN. In a folder, files that hold no text are
    passed over. A few files are split by blocks of lines, many by whole files.

    Raises ValueError if the path is missing, empty or not text.
    """
    files = stdlib_files() if corpus == "stdlib" else files_under(Path(corpus))
    path = Path(cache) / "corpus" / f"{fingerprint(files, LAYOUT, min_count)}.npz"
    arrays = kept(path, lambda: as_arrays(number(documents(files, corpus), min_count)))
    return Corpus(arrays["train"], arrays["held_out"], parted(arrays["words"]))


def stdlib_files() -> list[Path]:
    """The standard library's source files, sorted; installed packages are not part of it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    if not found:
        raise ValueError(f"this Python has no source files under {root}; pass corpus=PATH of a text")
    return found


def files_under(path: Path) -> list[Path]:
    """The file itself, or the files of a folder, sorted, hidden ones left out. Raises ValueError if none."""
    if not path.exists():
        raise ValueError(f"corpus {path} does not exist; pass the path of a text file or a folder of them")
    if path.is_file():
        return [path]
    inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
    found = [path / name for name in inside if not any(part.startswith(".") for part in name.parts)]
    if not found:
        raise ValueError(f"corpus {path} is a folder without files; pass one that holds text")
    return found


def documents(files: list[Path], corpus: str) -> list[str]:
    """What is held out or not as a whole: files if there are enough, else blocks of lines."""
    texts = [text for path in files if (text := decoded(path)) is not None]
    if not texts:
        raise ValueError(f"corpus {corpus} holds no text but binary data; pass UTF-8 text, plain or .gz")
    if not any(text.strip() for text in texts):
        raise ValueError(f"corpus {corpus} is empty; pass a file or folder that holds text")
    if len(texts) >= HELD_OUT_EVERY:
        return texts
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    block = -(-len(lines) // (4 * HELD_OUT_EVERY))
    return ["".join(lines[start : start + block]) for start in range(0, len(lines), block)]


def decoded(path: Path) -> str | None:
    """The text of a file, or None if it is binary. UTF-8; odd bytes become replacement marks."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"corpus file {path} is not the gzip file its name says: {error}") from error
    head = raw[:8192]
    strange = head.decode("utf-8", errors="replace").count("\ufffd")
    if b"\0" in head or strange > len(head) / 10:
        return None
    return raw.decode("utf-8", errors="replace")


def tokens(text: str) -> list[str]:
    """Identifiers or words, digit runs, single other marks and ends of lines; white space is dropped."""
    return TOKEN.findall(text)


def number(texts: list[str], min_count: int) -> Corpus:
    """Ranks the words of the training documents by frequency and spells both splits in ids."""
    first_seen: dict[str, int] = {}
    spelled = [
        np.array([first_seen.setdefault(word, len(first_seen)) for word in tokens(text)], dtype=np.int32)
        for text in texts
    ]
    held_out = np.concatenate([ids for i, ids in enumerate(spelled) if is_held_out(i)] or [spelled[0][:0]])
    train = np.concatenate([ids for i, ids in enumerate(spelled) if not is_held_out(i)])
    counts = np.bincount(train, minlength=len(first_seen))
    if "\n" in first_seen:
        counts[first_seen["\n"]] = 0  # it has its own id
    order = np.argsort(-counts, kind="stable")[: int((counts >= max(1, min_count)).sum())]
    names = list(first_seen)
    rank = np.full(len(names), UNKNOWN, dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32) + len(SPECIAL)
    if "\n" in first_seen:
        rank[first_seen["\n"]] = END_OF_LINE
    return Corpus(rank[train], rank[held_out], (*SPECIAL, *(names[i] for i in order)))


def is_held_out(document: int) -> bool:
    return document % HELD_OUT_EVERY == HELD_OUT_EVERY // 2


def as_arrays(corpus: Corpus) -> Arrays:
    return {"train": corpus.train, "held_out": corpus.held_out, "words": joined(corpus.words)}


def synthetic(vocabulary: int, length: int) -> Corpus:
    """A text nobody wrote: each word's successor is one of four, and words follow Zipf's law.

    No model can know the text by heart, yet a model of pairs can learn it, so training visibly helps.
    """
    rng = np.random.default_rng(0)
    zipf = 1.0 / np.arange(1, vocabulary + 1)
    successors = rng.choice(vocabulary, size=(vocabulary, 4), p=zipf / zipf.sum()).astype(np.int32)
    choices = rng.integers(0, 4, size=length)
    text = np.empty(length, dtype=np.int32)
    word = 0
    for i, choice in enumerate(choices):
        word = text[i] = successors[word, choice]
    cut = length - length // 10
    return Corpus(text[:cut], text[cut:], tuple(f"w{i}" for i in range(vocabulary)))
