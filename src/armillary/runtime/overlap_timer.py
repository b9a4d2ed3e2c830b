"""Times how much of a request compute can hide in this job.

A request needs a processor too: bytes are copied, summed and checked by somebody. Where ranks have cores to spare it
flies for nothing; eight ranks on two cores get from overlap only what the link itself is slow. What hides is measured,
with all ranks at once, as the time that compute and a request take together less than one after the other. Before
each, what a link lets pass faster for a moment is used up: it recovers while ranks compute.
"""

import statistics
import time
from collections.abc import Callable

import torch

from armillary.facts.collectives import AllReduce
from armillary.runtime.link_timer import use_up_burst
from armillary.runtime.transport import Transport

__all__ = ["hidden_share"]

SIZE_BYTES = 1 << 18
WIDTH = 128  # of the matrices of the compute, which stay in a core's cache
REPEATS = 5
SETTLING_PRODUCTS = 50


def hidden_share(transport: Transport) -> float:
    """Between 0 (one waits for the other) and 1 (the shorter one is free). Every rank must call it and gets the same.

    On one worker nothing flies, and it is 1.
    """
    if transport.place.workers == 1:
        return 1.0
    matrix = torch.rand(WIDTH, WIDTH)
    tensor = torch.zeros(SIZE_BYTES // matrix.element_size())

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def alone() -> None:
        transport.start(AllReduce(tensor), "measure")()

    def together(products: int) -> None:
        wait = transport.start(AllReduce(tensor), "measure")
        compute(products)
        wait()

    request = _seconds(transport, alone)
    once = _seconds(transport, lambda: compute(SETTLING_PRODUCTS)) / SETTLING_PRODUCTS
    products = max(1, round(request / once))
    shares = []
    for _ in range(REPEATS):
        both = [_once(transport, work) for work in (alone, lambda: compute(products), lambda: together(products))]
        shares.append((both[0] + both[1] - both[2]) / min(both[:2]))
    return min(1.0, max(0.0, statistics.median(shares)))


def _seconds(transport: Transport, work: Callable[[], None]) -> float:
    _once(transport, work)  # warms up
    return statistics.median(_once(transport, work) for _ in range(REPEATS))


def _once(transport: Transport, work: Callable[[], None]) -> float:
    """Of the slowest rank."""
    use_up_burst(transport, transport.place.workers, "world", torch.device("cpu"))
    transport.barrier()
    began = time.perf_counter()
    work()
    return transport.agree_largest([max(time.perf_counter() - began, 1e-9)])[0]
