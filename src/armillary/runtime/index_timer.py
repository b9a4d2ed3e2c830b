"""Times index work on this device: rows gathered out of a table, equal rows merged, rows added into a table.

What `exchanges/owned_rows` does with rows is timed with its own functions, on drawn ids, so that the figures are those
of the code that will run. All ranks do the same work at once: they share cores, caches and memory in training too.

Where ranks are more than cores they take turns, and a call that is shorter than a turn looks as fast as on an idle
machine. So calls are timed in blocks that take many turns, and it is their mean that counts, not their median.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from armillary.exchanges.owned_rows import merge_rows
from armillary.facts.processor import Processor, RowRate
from armillary.runtime.line import fit

__all__ = ["Timer", "processor"]

ROWS = (256, 4096)
WIDTHS = (16, 256)  # float32 elements of a row
TABLE_BYTES = 1 << 24  # more than caches hold, as tables worth splitting are
ITEM_BYTES = 4
SHARED = 2  # ranks that ask an owner for the same row, on average
COPIED_BYTES = 1 << 25
MOST_CALLS = 1000

Agree = Callable[[Sequence[float]], list[float]]


def processor(device: torch.device, block_seconds: float, agree: Agree) -> Processor:
    """The rates of this device.

    Args:
        block_seconds: of a rank alone, for each kind and size.
        agree: this rank's times -> those to be used, the same on every rank (the slowest rank's); ranks go on together.
    """
    sizes = list(product(ROWS, WIDTHS))
    timer = Timer(block_seconds, agree, device)
    works = [_works(rows, width, timer) for rows, width in sizes]
    source = torch.ones(COPIED_BYTES // ITEM_BYTES, device=device)
    target = torch.ones_like(source)
    copied = timer.seconds(lambda: target.copy_(source))
    agreed = agree([*(seconds for kind in zip(*works) for seconds in kind), copied])
    amounts = [(1.0, float(rows), float(rows * width * ITEM_BYTES)) for rows, width in sizes]
    count = len(sizes)
    gather, merge, add = (_rate(amounts, agreed[first : first + count]) for first in range(0, 3 * count, count))
    return Processor(gather, merge, add, memory_bytes_per_second=2 * COPIED_BYTES / agreed[-1])


def _works(rows: int, width: int, timer: "Timer") -> tuple[float, float, float]:
    """Seconds to gather, merge and add so many rows of so many elements."""
    generator, device = torch.Generator().manual_seed(0), timer.device
    table = torch.ones(TABLE_BYTES // ITEM_BYTES // width, width, device=device)  # zeros would share one page
    ids = torch.randint(len(table), (rows,), generator=generator).to(device)
    twice = torch.randint(max(1, rows // SHARED), (rows,), generator=generator).to(device)
    gradients = torch.ones(rows, width, device=device)
    return (
        timer.seconds(lambda: table.index_select(0, ids)),
        timer.seconds(lambda: merge_rows(twice, gradients)),
        timer.seconds(lambda: table.index_add_(0, ids, gradients)),
    )


def _rate(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> RowRate:
    line = fit(amounts, seconds)
    call, row, byte = line.costs
    return RowRate(call, row, byte, line.residual)


@dataclass(frozen=True)
class Timer:
    """Times work that all ranks do at once; arguments as in `processor`."""

    block_seconds: float
    agree: Agree
    device: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Mean of a block of calls after one that warms up. Every rank makes as many, and begins with the others."""
        self._block(work, 1)
        (once,) = self.agree([self._block(work, 1)])
        calls = min(MOST_CALLS, max(1, round(self.block_seconds / once)))
        return self._block(work, calls) / calls

    def _block(self, work: Callable[[], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - began, 1e-9)
