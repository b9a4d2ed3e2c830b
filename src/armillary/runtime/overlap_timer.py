"""Times how much of its requests compute can hide in this job, and what a request takes of compute however small it is.

A request needs a processor too: bytes are copied, summed and checked by somebody. Where ranks have cores to spare it
flies for nothing; eight ranks on two cores get from overlap only what the link itself is slow. What hides is measured,
with all ranks at once, as the time that compute and requests take together less than one after the other. There are as
many requests, and as large, as take 20 ms: of one alone that takes one (loopback), the share measured was anything from
0 to 1. Before each, what a link lets pass faster for a moment is used up: it recovers while ranks compute.

A small request has hardly any bytes to hide, but it is called, it wakes threads, and ranks that share cores wait for
each other: two ranks on two cores lost 0.3 to 1 ms of compute to each. So compute with small requests in it, each taken
when the next one starts, is timed beside compute alone.

Of each the quicker half of the trials counts: what else a machine does makes one longer and never shorter. By medians
of differences the share came out as anything from 0 to 0.8 in one job (two ranks on two cores, loopback), so at most
0.2; and what a small request takes as 0.4 to 1.5 ms, so 0.5 to 1.0. Every trial delays the start of a training, so
there are no more than it takes: kinds of requests share the trials of compute alone.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.facts.collectives import AllReduce, Request
from armillary.runtime.link_timer import ITEM_BYTES, request_of, use_up_burst
from armillary.runtime.transport import Transport

__all__ = ["BesideCompute", "beside_seconds", "hidden_share"]

SIZE_BYTES, MOST_BYTES = 1 << 18, 1 << 22  # of a request
MOST_REQUESTS = 8  # under way at once, as buckets are
LONG_SECONDS = 0.02  # of the requests together: shorter ones tell noise
WIDTH = 128  # of the matrices of the compute, which stay in a core's cache
REPEATS, SETTLING_REPEATS = 4, 2
SETTLING_PRODUCTS = 50
SMALL_BYTES, SMALL_REQUESTS = 1 << 10, 4
SMALL_REPEATS = 9
SMALL_SECONDS = 0.008  # of compute that they are spread over


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
    works = (lambda: fly(tensors), lambda: compute(products), lambda: fly(tensors, products))
    alone, computed, together = map(_undisturbed, _trials(transport, works, REPEATS))
    return min(1.0, max(0.0, (alone + computed - together) / min(alone, computed)))


class BesideCompute(NamedTuple):
    """seconds: by how much a small request delays a rank that computes beside it. scatter: of these, in seconds: two
    standard errors."""

    seconds: float
    scatter_seconds: float


def beside_seconds(transport: Transport, kinds: Sequence[str]) -> dict[str, BesideCompute]:
    """Of every kind of request. Every rank must call it and gets the same."""
    matrix = torch.rand(WIDTH, WIDTH)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def spread(request: Request) -> None:
        taken: Callable[[], object] = int
        for _ in range(SMALL_REQUESTS):
            taken()
            taken = transport.start(request, "measure")
            compute(products // SMALL_REQUESTS)
        taken()

    once = _seconds(transport, lambda: compute(SETTLING_PRODUCTS)) / SETTLING_PRODUCTS
    products = SMALL_REQUESTS * max(1, round(SMALL_SECONDS / once / SMALL_REQUESTS))
    device = torch.device("cpu")
    requests = [request_of(kind, SMALL_BYTES, transport.place.workers, "world", device) for kind in kinds]
    works: list[Callable[[], None]] = [partial(compute, products)]
    works += [partial(spread, request) for request in requests]
    alone, *others = _trials(transport, works, SMALL_REPEATS)
    return {kind: _beside(alone, other) for kind, other in zip(kinds, others, strict=True)}


def _beside(alone: Sequence[float], together: Sequence[float]) -> BesideCompute:
    without, with_them = map(_undisturbed, (alone, together))
    each = [(one - other) / SMALL_REQUESTS for one, other in zip(sorted(together), sorted(alone), strict=True)]
    kept = each[: len(each) // 2 + 1]
    error = statistics.stdev(kept) / math.sqrt(len(kept)) if len(kept) > 1 else 0.0
    return BesideCompute(max(0.0, with_them - without) / SMALL_REQUESTS, 2 * error)


def _long_enough(request: float) -> list[Tensor]:
    """Tensors whose requests together take about `LONG_SECONDS`, where one of the smallest takes that many: more of
    them first, then larger ones."""
    wanted = max(1.0, LONG_SECONDS / request)
    count = round(min(wanted, MOST_REQUESTS))
    nbytes = min(MOST_BYTES, SIZE_BYTES * wanted / count)
    return [torch.zeros(round(nbytes) // ITEM_BYTES) for _ in range(count)]


def _trials(transport: Transport, works: Sequence[Callable[[], None]], repeats: int) -> list[tuple[float, ...]]:
    """Seconds of every trial of each; they are done by turns."""
    return list(zip(*([_once(transport, work) for work in works] for _ in range(repeats)), strict=True))


def _undisturbed(taken: Sequence[float]) -> float:
    """The mean of the quicker half."""
    return statistics.fmean(sorted(taken)[: len(taken) // 2 + 1])


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
