"""Times index work on this device: rows gathered out of a table, equal rows merged, rows added into a table.

What `exchanges/owned_rows` does with rows is timed with its own functions, on drawn ids, so that the figures are those
of the code that will run. All ranks should call this at once: they share cores, caches and memory in training too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product

import torch

from armillary.exchanges.owned_rows import merge_rows
from armillary.facts.processor import Processor, RowRate
from armillary.runtime.line import fit

__all__ = ["processor"]

ROWS = (256, 4096)
WIDTHS = (16, 256)  # float32 elements of a row
TABLE_BYTES = 1 << 24  # more than caches hold, as tables worth splitting are
ITEM_BYTES = 4
SHARED = 2  # ranks that ask an owner for the same row, on average
COPIED_BYTES = 1 << 25

Agree = Callable[[Sequence[float]], list[float]]


def processor(device: torch.device, repeats: int, agree: Agree) -> Processor:
    """The rates of this device.

    Args:
        repeats: per kind and size; the median counts.
        agree: this rank's times -> those to be used, the same on every rank (the slowest rank's).
    """
    sizes = list(product(ROWS, WIDTHS))
    works = [_works(rows, width, repeats, device) for rows, width in sizes]
    source = torch.ones(COPIED_BYTES // ITEM_BYTES, device=device)
    target = torch.ones_like(source)
    copied = _median(lambda: target.copy_(source), repeats, device)
    agreed = agree([*(seconds for kind in zip(*works) for seconds in kind), copied])
    amounts = [(1.0, float(rows), float(rows * width * ITEM_BYTES)) for rows, width in sizes]
    count = len(sizes)
    gather, merge, add = (_rate(amounts, agreed[first : first + count]) for first in range(0, 3 * count, count))
    return Processor(gather, merge, add, memory_bytes_per_second=2 * COPIED_BYTES / agreed[-1])


def _works(rows: int, width: int, repeats: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds to gather, merge and add so many rows of so many elements."""
    generator = torch.Generator().manual_seed(0)
    table = torch.ones(TABLE_BYTES // ITEM_BYTES // width, width, device=device)  # zeros would share one page
    ids = torch.randint(len(table), (rows,), generator=generator).to(device)
    twice = torch.randint(max(1, rows // SHARED), (rows,), generator=generator).to(device)
    gradients = torch.ones(rows, width, device=device)
    return (
        _median(lambda: table.index_select(0, ids), repeats, device),
        _median(lambda: merge_rows(twice, gradients), repeats, device),
        _median(lambda: table.index_add_(0, ids, gradients), repeats, device),
    )


def _rate(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> RowRate:
    line = fit(amounts, seconds)
    call, row, byte = line.costs
    return RowRate(call, row, byte, line.residual)


def _median(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of `repeats` runs after one that warms up; on an accelerator each waits for the device."""
    spent = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    return max(statistics.median(spent[1:]), 1e-9)
