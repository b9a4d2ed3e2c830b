"""A scratch file past the page cache, with one thread that writes and one that reads.

The page cache would make a swap look free and take the memory back that it was to spare, so the file is opened with
O_DIRECT and carried through one aligned buffer a lane. It has no name: nothing is left of it when its process ends.
"""

import errno
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from armillary.residency.stage_costs import TierSpeed

__all__ = ["Lane", "Tier", "free_bytes", "measure_tier"]

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 4 << 10  # what O_DIRECT wants lengths and offsets to be multiples of
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
TRIAL_BYTES = 64 << 20


class Lane:
    """One thread that carries out jobs in the order given, through a buffer of its own."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[mmap.mmap, Tensor], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"armillary-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[mmap.mmap, Tensor], None]) -> None:
        """The job gets the buffer, as memory and as a tensor of bytes; it must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """What was put before is still done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        buffer = mmap.mmap(-1, CHUNK_BYTES)  # of its own pages, so aligned as O_DIRECT wants it
        view = torch.frombuffer(buffer, dtype=torch.uint8)
        while (job := self._jobs.get()) is not None:
            job(buffer, view)
            del job  # it holds memory until the next one comes


class Tier:
    """
    Args of note:
        folder: on a disk. bytes_per_second: the most carried each way, to try a slower tier; None: as fast as it is.

    Raises:
        ValueError: the folder is missing, lies in memory or cannot be written.
    """

    def __init__(self, folder: str | Path, bytes_per_second: float | None = None) -> None:
        self.folder = str(folder)
        self._rate = bytes_per_second
        self._file, self.is_direct = _opened(self.folder)
        self._lock = threading.Lock()
        self._end = 0
        self.is_closed = False
        self._free: dict[int, list[int]] = {}
        self.lane_processor_seconds = 0.0
        self.writes, self.reads = Lane("writes"), Lane("reads")

    def __enter__(self) -> "Tier":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Once; what was put before is still carried."""
        if self.is_closed:
            return
        self.is_closed = True
        self.writes.close()
        self.reads.close()
        os.close(self._file)

    def take_place(self, nbytes: int) -> int:
        """An offset in the file with room for so many bytes."""
        size = _whole_blocks(nbytes)
        with self._lock:
            if self._free.get(size):
                return self._free[size].pop()
            offset, self._end = self._end, self._end + size
            return offset

    def give_place(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._free.setdefault(_whole_blocks(nbytes), []).append(offset)

    def write(self, flat: Tensor, offset: int, buffer: mmap.mmap, view: Tensor) -> None:
        """Bytes to the file. In the thread of the writing lane.

        Raises:
            OSError: the disk is full, or took fewer bytes than given.
        """
        began, spent = time.perf_counter(), time.thread_time()
        for at in range(0, len(flat), CHUNK_BYTES):
            part = flat[at : at + CHUNK_BYTES]
            view[: len(part)].copy_(part)
            size = _whole_blocks(len(part))
            done = os.pwritev(self._file, [memoryview(buffer)[:size]], offset + at)
            if done != size:
                raise OSError(errno.EIO, f"the tier took {done} of {size} bytes")
            self._wait(began, at + len(part))
        self.lane_processor_seconds += time.thread_time() - spent

    def read(self, flat: Tensor, offset: int, buffer: mmap.mmap, view: Tensor) -> None:
        """Bytes from the file. In the thread of the reading lane.

        Raises:
            OSError: the file gave fewer bytes than were written.
        """
        began, spent = time.perf_counter(), time.thread_time()
        for at in range(0, len(flat), CHUNK_BYTES):
            part = flat[at : at + CHUNK_BYTES]
            size = _whole_blocks(len(part))
            done = os.preadv(self._file, [memoryview(buffer)[:size]], offset + at)
            if done != size:
                raise OSError(errno.EIO, f"the tier gave {done} of {size} bytes")
            part.copy_(view[: len(part)])
            self._wait(began, at + len(part))
        self.lane_processor_seconds += time.thread_time() - spent

    def _wait(self, began: float, nbytes: int) -> None:
        if self._rate and (early := nbytes / self._rate - (time.perf_counter() - began)) > 0:
            time.sleep(early)


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _opened(folder: str) -> tuple[int, bool]:
    """A file without a name, and whether it goes past the page cache."""
    if not os.path.isdir(folder):
        raise ValueError(f"residency: tier {folder!r} is no folder; make it, on a disk with room for what is swapped")
    kind = _file_system(folder)
    if kind in IN_MEMORY:
        raise ValueError(f"residency: tier {folder!r} lies on {kind}, which is memory itself; name a folder on a disk")
    try:
        handle, path = tempfile.mkstemp(prefix="armillary-tier-", dir=folder)
    except OSError as error:
        raise ValueError(f"residency: tier {folder!r} cannot be written: {error.strerror}") from None
    try:
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system's word that it knows no direct access
                raise
            return handle, False
        os.close(handle)
        return direct, True
    finally:
        os.unlink(path)


def _file_system(folder: str) -> str:
    """The kind of file system that the folder lies on; empty where the system does not say."""
    path, best, kind = os.path.realpath(folder), "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        _, at, name, *_ = line.split()
        at = at.replace("\\040", " ")
        if (path == at or path.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, kind = at, name
    return kind


def free_bytes(folder: str) -> int:
    return shutil.disk_usage(folder).free


def measure_tier(tier: Tier, nbytes: int = TRIAL_BYTES) -> TierSpeed:
    """Carries so many bytes out and back, by its lanes. Processor time counts only where no core is idle."""
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    offset = tier.take_place(nbytes)
    before = tier.lane_processor_seconds
    seconds = [
        _seconds(lane, work, flat, offset) for lane, work in ((tier.writes, tier.write), (tier.reads, tier.read))
    ]
    tier.give_place(offset, nbytes)
    spent = (tier.lane_processor_seconds - before) / (2 * nbytes)
    return TierSpeed(nbytes / seconds[0], nbytes / seconds[1], 0.0 if _has_idle_core() else spent, tier.is_direct)


def _seconds(lane: Lane, work: Callable[[Tensor, int, mmap.mmap, Tensor], None], flat: Tensor, offset: int) -> float:
    done, taken, failed = threading.Event(), [0.0], [None]

    def job(buffer: mmap.mmap, view: Tensor) -> None:
        began = time.perf_counter()
        try:
            work(flat, offset, buffer, view)
        except OSError as error:
            failed[0] = error  # type: ignore[call-overload]
        taken[0] = time.perf_counter() - began
        done.set()

    lane.put(job)
    done.wait()
    if failed[0] is not None:
        raise failed[0]
    return taken[0]


def _has_idle_core() -> bool:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len(os.sched_getaffinity(0)) > ranks * torch.get_num_threads()
