"""Times how much of its requests compute can hide in this job.

A request needs a processor too: bytes are copied, summed and checked by somebody. Where ranks have cores to spare it
flies for nothing; eight ranks on two cores get from overlap only what the link itself is slow. What hides is measured,
with all ranks at once, as the time that compute and requests take together less than one after the other. There are as
many requests, and as large, as take 20 ms: of one alone that takes one (loopback), the share measured was anything from
0 to 1. Before each, what a link lets pass faster for a moment is used up: it recovers while ranks compute.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import AllReduce
from armillary.runtime.link_timer import ITEM_BYTES, use_up_burst
from armillary.runtime.transport import Transport

__all__ = ["hidden_share"]

SIZE_BYTES, MOST_BYTES = 1 << 18, 1 << 22  # of a request
MOST_REQUESTS = 8  # under way at once, as buckets are
LONG_SECONDS = 0.02  # of the requests together: shorter ones tell noise
WIDTH = 128  # of the matrices of the compute, which stay in a core's cache
REPEATS, SETTLING_REPEATS = 7, 3
SETTLING_PRODUCTS = 50


def hidden_share(transport: Transport) -> float:
    """Between 0 (one waits for the other) and 1 (the shorter one is free). Every rank must call it and gets the same.

    On one worker nothing flies, and it is 1.
    """
    if transport.place.workers == 1:
        return 1.0
    matrix = torch.rand(WIDTH, WIDTH)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def fly(tensors: Sequence[Tensor], products: int = 0) -> None:
        waits = [transport.start(AllReduce(tensor), "measure") for tensor in tensors]
        compute(products)
        for wait in waits:
            wait()

    smallest = [torch.zeros(SIZE_BYTES // ITEM_BYTES)]
    tensors = _long_enough(_seconds(transport, lambda: fly(smallest)))
    flown = _seconds(transport, lambda: fly(tensors))
    once = _seconds(transport, lambda: compute(SETTLING_PRODUCTS)) / SETTLING_PRODUCTS
    products = max(1, round(flown / once))
    shares = []
    for _ in range(REPEATS):
        works = (lambda: fly(tensors), lambda: compute(products), lambda: fly(tensors, products))
        alone, computed, together = (_once(transport, work) for work in works)
        shares.append((alone + computed - together) / min(alone, computed))
    return min(1.0, max(0.0, statistics.median(shares)))


def _long_enough(request: float) -> list[Tensor]:
    """Tensors whose requests together take about `LONG_SECONDS`, where one of the smallest takes that many: more of
    them first, then larger ones."""
    wanted = max(1.0, LONG_SECONDS / request)
    count = round(min(wanted, MOST_REQUESTS))
    nbytes = min(MOST_BYTES, SIZE_BYTES * wanted / count)
    return [torch.zeros(round(nbytes) // ITEM_BYTES) for _ in range(count)]


def _seconds(transport: Transport, work: Callable[[], None]) -> float:
    _once(transport, work)  # warms up
    return statistics.median(_once(transport, work) for _ in range(SETTLING_REPEATS))


def _once(transport: Transport, work: Callable[[], None]) -> float:
    """Of the slowest rank."""
    use_up_burst(transport, transport.place.workers, "world", torch.device("cpu"))
    transport.barrier()
    began = time.perf_counter()
    work()
    return transport.agree_largest([max(time.perf_counter() - began, 1e-9)])[0]
