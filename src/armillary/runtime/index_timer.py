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

ROWS = (256, 2048, 8192)
WIDTHS = (16, 128, 512)  # float32 elements of a row
TABLE_BYTES = 1 << 25  # more than caches hold, as tables worth splitting are
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
    generator = torch.Generator().manual_seed(0)
    works: dict[str, list[float]] = {"gather": [], "merge": [], "add": []}
    sizes = list(product(ROWS, WIDTHS))
    for rows, width in sizes:
        table = torch.ones(TABLE_BYTES // ITEM_BYTES // width, width, device=device)  # zeros would share one page
        ids = torch.randint(len(table), (rows,), generator=generator).to(device)
        twice = torch.randint(max(1, rows // SHARED), (rows,), generator=generator).to(device)
        gradients = torch.ones(rows, width, device=device)
        works["gather"].append(_median(lambda t=table, i=ids: t.index_select(0, i), repeats, device))  # type: ignore[misc]
        works["merge"].append(_median(lambda i=twice, g=gradients: merge_rows(i, g), repeats, device))  # type: ignore[misc]
        works["add"].append(_median(lambda t=table, i=ids, g=gradients: t.index_add_(0, i, g), repeats, device))  # type: ignore[misc]
    source = torch.ones(COPIED_BYTES // ITEM_BYTES, device=device)
    target = torch.ones_like(source)
    copied = _median(lambda: target.copy_(source), repeats, device)
    agreed = agree([*works["gather"], *works["merge"], *works["add"], copied])
    count = len(sizes)
    amounts = [(1.0, float(rows), float(rows * width * ITEM_BYTES)) for rows, width in sizes]
    rates = [_rate(amounts, agreed[first : first + count]) for first in range(0, 3 * count, count)]
    return Processor(*rates, memory_bytes_per_second=2 * COPIED_BYTES / agreed[-1])


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
