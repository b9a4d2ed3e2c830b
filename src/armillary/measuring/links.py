"""Times the requests there are on the links of a job, fits latency and bandwidth, and measures how much compute hides.

Requests differ: an all-reduce waits for 2 (N - 1) messages one after another, an all-to-all posts all its pieces at
once. So each is timed and fitted by itself, as training makes them: several in a row after a little compute, without a
barrier. The first of a row does not count, since ranks come to it one by one. The mean counts, without the slowest
twentieth: quick requests scatter, and a step makes many. By medians, steps with rows at their owners were forecast at
half of what they took. Links are timed in use, because many let a burst pass faster than they go on.

A request needs a processor too. Where ranks share cores, overlap hides only what the link itself is slow. So what hides
is measured with all ranks at once (`hidden_share`): the time that compute and requests take together less than one
after the other, over requests of 20 ms. What a small request costs compute is timed beside compute alone
(`beside_seconds`). The quicker half of the trials counts: what else a machine does makes one longer and never shorter.

Source: Thakur, Rabenseifner and Gropp (2005) for the messages of a ring.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.plans.requests import AllGather, AllReduce, AllToAll, Program, Request, Scope, sent_bytes
from armillary.plans.topology import Link, RequestLink, Side
from armillary.transport.transport import Transport

__all__ = [
    "QUICK",
    "THOROUGH",
    "BesideCompute",
    "Effort",
    "beside_seconds",
    "hidden_share",
    "request_link",
    "request_of",
    "sides",
    "use_up_burst",
]

ITEM_BYTES = 4
SCOPES: dict[Side, Scope] = {"inside": "node", "between": "rail"}


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Args of note:
        kinds: of requests, by name. sizes: bytes of the tensors, ascending. rows: of requests per size, at least.
        longest_seconds: for one kind on one side; a slow link is measured with fewer large messages, yet with as many
            sizes as it takes to tell its speed from its latency.
        times_coding: whether to time the exchanges that are not exact; they are priced at a default otherwise.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: int
    longest_seconds: float
    times_coding: bool = False


QUICK = Effort(("AllReduce", "AllToAll"), (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22), 3, 1.5)
FEWEST_SIZES = 3
IN_A_ROW = 4
SIZE_SECONDS, MOST_ROWS = 0.03, 24  # quick requests are made for so long, in so many rows at most
WIDTH, PRODUCTS = 128, 20
BURST_BYTES = 1 << 19  # sent before a size is timed, so that no credit is left
THOROUGH = Effort(("AllReduce", "AllGather", "AllToAll"), tuple(1 << power for power in range(10, 25, 2)), 4, 8.0, True)


def request_link(
    transport: Transport, kind: str, side: Side, ranks: int, effort: Effort, device: torch.device
) -> RequestLink:
    """Latency and bandwidth of one kind of request among the `ranks` ranks of that side; the slowest rank counts.

    Every rank must call it, stops at the same size and gets the same answer.
    """
    messages = {"AllReduce": 2 * (ranks - 1), "AllGather": ranks - 1, "AllToAll": 1}[kind]
    amounts, times, scatters = [], [], []
    budget = effort.longest_seconds
    for size, larger in zip(effort.sizes, (*effort.sizes[1:], effort.sizes[-1])):
        request = request_of(kind, size, ranks, SCOPES[side], device)
        spent, scatter = transport.agree_largest(_seconds(transport, request, ranks, effort.rows))
        amounts.append((float(messages), sent_bytes(request, ranks, 0)))
        times.append(spent)
        scatters.append(scatter)
        asked = effort.rows * IN_A_ROW
        budget -= spent * asked
        if len(times) >= FEWEST_SIZES and budget < _foreseen(amounts, times, larger / size) * asked:
            break
    latency, byte = _line(amounts, times)
    said = [count * latency + sent * byte for count, sent in amounts]
    residual = max(abs(line / spent - 1) for line, spent in zip(said, times, strict=True))
    return RequestLink(kind, side, Link(latency, 1 / max(byte, 1e-15)), residual, scatter=statistics.median(scatters))


def _line(amounts: Sequence[tuple[float, float]], times: Sequence[float]) -> tuple[float, float]:
    """Seconds a message and seconds a byte, through the smallest and the largest request. Those between are left out: a
    burst that passes at once makes them quick, and a plan lives on what is large. But where a larger one was quicker
    than the smallest, the smallest had waited for a core."""
    quickest = times.index(min(times[:-1]))
    (messages, few), (_, many) = amounts[quickest], amounts[-1]
    byte = max(0.0, times[-1] - times[quickest]) / (many - few)
    return max(0.0, times[quickest] - few * byte) / messages, byte


def _foreseen(amounts: Sequence[tuple[float, float]], times: Sequence[float], factor: float) -> float:
    """Seconds of a request so many times the size of the last one, by what was measured so far. A small request is
    nearly all latency, so that a multiple of its time would forbid sizes that take hardly longer."""
    latency, byte = _line(amounts, times)
    messages, sent = amounts[-1]
    return messages * latency + factor * sent * byte


def request_of(kind: str, size: int, ranks: int, scope: Scope, device: torch.device) -> Request:
    """A request whose tensors together have about `size` bytes on a rank."""
    piece = max(1, size // ITEM_BYTES // ranks)
    if kind == "AllReduce":
        return AllReduce(torch.zeros(piece * ranks, device=device), scope)
    if kind == "AllGather":
        return AllGather(torch.zeros(piece, device=device), scope)
    return AllToAll(torch.zeros(piece * ranks, device=device), (piece,) * ranks, (piece,) * ranks, scope)


def use_up_burst(transport: Transport, ranks: int, scope: Scope, device: torch.device) -> None:
    """Leaves a link no credit to send faster than it goes on, and nothing queued."""
    transport.complete(_asking(request_of("AllToAll", BURST_BYTES, ranks, scope, device)), "measure")


class _Timed(NamedTuple):
    """Seconds of a request; and their scatter, a share of these: two standard errors of the mean."""

    seconds: float
    scatter: float


def _seconds(transport: Transport, request: Request, ranks: int, fewest: int) -> _Timed:
    """The mean request of rows without their first, and without the slowest twentieth: what else a machine does. On an
    accelerator each waits for the device. Every rank makes as many rows, by what the row that warms up took on the
    slowest."""
    transport.barrier()
    use_up_burst(transport, ranks, request.scope, request.tensor.device)
    warm = transport.agree_largest([sum(_row(transport, request))])[0]
    count = max(fewest, min(MOST_ROWS, int(SIZE_SECONDS / max(warm, 1e-9))))
    rows = [_row(transport, request)[1:] for _ in range(count)]
    taken = sorted(seconds for row in rows for seconds in row)
    mean = statistics.fmean(taken[: len(taken) - len(taken) // 20])
    means = [statistics.fmean(row) for row in rows]  # requests of one row are not independent of one another
    return _Timed(mean, 2 * statistics.stdev(means) / math.sqrt(count) / mean if count > 1 and mean > 0 else 0.0)


def _row(transport: Transport, request: Request) -> list[float]:
    """Seconds of each request of a row, after a little compute."""
    _compute(request.tensor.device)
    marks = [time.perf_counter()]
    for _ in range(IN_A_ROW):
        transport.complete(_asking(request), "measure")
        if request.tensor.device.type == "cuda":
            torch.cuda.synchronize(request.tensor.device)
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


def _compute(device: torch.device) -> None:
    """About a millisecond of a core."""
    if device.type == "cpu":
        matrix = torch.ones(WIDTH, WIDTH)
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)


def _asking(request: Request) -> Program[Tensor]:
    answer: Tensor = yield request
    return answer


def sides(transport: Transport) -> Iterator[tuple[Side, int]]:
    """The sides that this job has links on, with the number of ranks that share each."""
    if transport.place.workers_per_node > 1:
        yield "inside", transport.place.workers_per_node
    if transport.place.nodes > 1:
        yield "between", transport.place.nodes


SIZE_BYTES, MOST_BYTES = 1 << 18, 1 << 22  # of a request
MOST_REQUESTS = 8  # under way at once, as buckets are
LONG_SECONDS = 0.02  # of the requests together: shorter ones tell noise
MATRIX_WIDTH = 128  # of the matrices of the compute, which stay in a core's cache
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
    matrix = torch.rand(MATRIX_WIDTH, MATRIX_WIDTH)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def fly(tensors: Sequence[Tensor], products: int = 0) -> None:
        waits = [transport.start(AllReduce(tensor), "measure") for tensor in tensors]
        compute(products)
        for wait in waits:
            wait()

    smallest = [torch.zeros(SIZE_BYTES // ITEM_BYTES)]
    tensors = _long_enough(_overlapped_seconds(transport, lambda: fly(smallest)))
    flown = _overlapped_seconds(transport, lambda: fly(tensors))
    once = _overlapped_seconds(transport, lambda: compute(SETTLING_PRODUCTS)) / SETTLING_PRODUCTS
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
    matrix = torch.rand(MATRIX_WIDTH, MATRIX_WIDTH)

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

    once = _overlapped_seconds(transport, lambda: compute(SETTLING_PRODUCTS)) / SETTLING_PRODUCTS
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


def _overlapped_seconds(transport: Transport, work: Callable[[], None]) -> float:
    _once(transport, work)  # warms up
    return statistics.median(_once(transport, work) for _ in range(SETTLING_REPEATS))


def _once(transport: Transport, work: Callable[[], None]) -> float:
    """Of the slowest rank."""
    use_up_burst(transport, transport.place.workers, "world", torch.device("cpu"))
    transport.barrier()
    began = time.perf_counter()
    work()
    return transport.agree_largest([max(time.perf_counter() - began, 1e-9)])[0]
