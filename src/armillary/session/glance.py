"""Which held-out batches a run looks at while it trains: a fixed random few, as the first may be unlike the rest.

Source: Vitter, 1985 (reservoir sampling, algorithm R): a stream need not say how long it is, and only the sample is
held.
"""

import random
from collections.abc import Iterable
from itertools import islice

from armillary.session.workload import Batch

__all__ = ["AMONG", "sampled"]

AMONG = 256  # batches drawn at most, so that an endless or a slow stream costs little


def sampled(batches: Iterable[Batch], count: int, seed: int) -> list[Batch]:
    """`count` of the first AMONG batches, each as likely as any other; all of them if there are no more.
    The same batches and seed give the same sample."""
    stream = random.Random(seed)
    chosen: list[Batch] = []
    for number, batch in enumerate(islice(batches, AMONG)):
        place = number if number < count else stream.randrange(number + 1)
        if place < len(chosen):
            chosen[place] = batch
        elif place < count:
            chosen.append(batch)
    return chosen
