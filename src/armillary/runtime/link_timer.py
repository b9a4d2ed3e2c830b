"""Times the requests there are on the links of a job, and fits latency and bandwidth to each.

Requests differ: an all-reduce waits for 2 (N - 1) messages one after another, an all-to-all posts all its pieces at
once, and backends differ in what they make of either. So each is timed and fitted by itself.

Requests are timed as training makes them: several in a row (a look-up's header, ids and rows) after a little compute,
without a barrier before it. Right after a barrier every rank is awake and waits; after compute ranks come one by one,
and where they share cores some still wait for one. That wait is compute's, so the first request of a row does not
count: of 8 ranks on 2 cores a short all-to-all right after compute seemed to take 5 to 7 ms, and one more in a row 3.

Of quick requests one in four takes five times as long as the others (threads that wait for a core). A step makes many
and pays for these too, so the mean counts, without the slowest twentieth, of as many as pass in some tens of
milliseconds: of 2 ranks on 2 cores a short all-to-all takes 0.2 ms in the median and 0.6 in the mean. By medians, steps
with rows at their owners were forecast at half of what they took. Links are timed in use: many (clouds', and every
token bucket) let a burst pass faster than they go on, and training sends a burst's bytes over and over.

Source: Thakur, Rabenseifner and Gropp (2005) for the messages of a ring.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.facts.collectives import AllGather, AllReduce, AllToAll, Program, Request, Scope, sent_bytes
from armillary.facts.topology import Link, RequestLink, Side
from armillary.runtime.transport import Transport

__all__ = ["QUICK", "THOROUGH", "Effort", "request_link", "request_of", "sides", "use_up_burst"]

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
