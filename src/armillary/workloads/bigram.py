"""A smoothed bigram model: the yardstick any neural language model must beat.

Counting pairs takes seconds, so a model that has trained for minutes and is no better has not learned.

Source: Kneser & Ney, 1995, interpolated form of Chen & Goodman, 1999 (one discount, n1 / (n1 + 2 n2)).
Departure: the unigram level is itself interpolated with the uniform distribution, so every word has a
probability.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bigram", "count", "cross_entropy", "probabilities"]

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
