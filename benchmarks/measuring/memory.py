"""How much memory this process has, and the most it had since a moment, as the kernel saw it.

PSS counts a page shared by n processes as 1/n of a page, so the figures of ranks on one machine add up;
but it is only known for now. The high-water mark of RSS is exact for every moment and costs nothing while
the model runs. Pages a training step adds are private, where both count alike, so

    peak PSS = PSS at the start + (high-water mark of RSS since then - RSS at the start).

Source: proc(5), /proc/<pid>/smaps_rollup, /proc/<pid>/status, and clear_refs (5 resets the mark).
"""

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")


@dataclass(frozen=True)
class Level:
    """Where memory stood when a watch began."""

    pss_bytes: int
    rss_bytes: int


def pss_bytes() -> int:
    """Memory of this process now, its share of shared pages included. Walks all pages: milliseconds per GB.

    Pages of files are left out, which are libraries: a process's share of those changes as others come and go.
    """
    return sum(_kilobytes(SELF / "smaps_rollup", kind) for kind in ("Pss_Anon", "Pss_Shmem")) * 1024


def begin_watch() -> Level:
    """Forgets earlier peaks; `peak_bytes` tells of those from now on. One watch at a time."""
    (SELF / "clear_refs").write_text("5")
    return Level(pss_bytes(), _kilobytes(SELF / "smaps_rollup", "Rss") * 1024)


def peak_bytes(since: Level) -> int:
    """The most PSS this process had since the watch began."""
    return since.pss_bytes + _kilobytes(SELF / "status", "VmHWM") * 1024 - since.rss_bytes


def return_freed_memory() -> None:
    """Collects cycles (DistributedDataParallel is one) and hands freed memory back to the kernel.

    Blocks above glibc's threshold go back when freed, but that threshold grows up to 32 MiB as such blocks
    come and go. Smaller ones stay in the heap, up to 64 MiB of them at its end: by so much a peak may be
    higher than what tensors needed at once. That memory is taken, so it is counted.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _kilobytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0])
    raise RuntimeError(f"memory: {path} has no field {field}; this needs Linux with CONFIG_PROC_PAGE_MONITOR")
