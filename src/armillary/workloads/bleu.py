"""Corpus BLEU from sums, so that it can be added up over batches and workers.

Source: Papineni et al., ACL 2002, n-grams up to 4 with the brevity penalty, one reference. It is taken over
the workload's own tokens, so its values compare between runs of one workload only.
"""

import math
from collections import Counter
from collections.abc import Sequence

__all__ = ["ORDERS", "counts", "score"]

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
