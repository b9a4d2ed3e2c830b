"""Slower memory, with one thread that writes and one that reads: a scratch file, or the host's memory for a device.

The page cache would make a swap look free and take the memory back that it was to spare, so the file is opened with
O_DIRECT and carried through one aligned buffer a lane. It has no name: nothing is left of it when its process ends.
Bytes of a device are copied on a stream of the lane's own, behind an event of the stream that made them.
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
from typing import Protocol

import torch
from torch import Tensor

from armillary.residency.stage_costs import TierSpeed

__all__ = ["PINNED", "FileTier", "Lane", "PinnedTier", "Tier", "carry_behind", "measure_tier", "moment_of", "open_tier"]

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 4 << 10  # what O_DIRECT wants lengths and offsets to be multiples of
IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}
TRIAL_BYTES = 64 << 20
PINNED = "pinned"  # the word of `tier=` for the host's memory


class Lane:
    """One thread that carries out jobs in the order given."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"armillary-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """It must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """What was put before is still done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds memory until the next one comes


class Tier(Protocol):
    """Where storages go. where: in words, for messages. is_direct: past the page cache."""

    where: str
    is_direct: bool
    is_closed: bool
    lane_processor_seconds: float
    writes: Lane
    reads: Lane

    def take_place(self, nbytes: int) -> int:
        """The number of a place for so many bytes."""

    def give_place(self, place: int, nbytes: int) -> None:
        """It may be used again."""

    def write(self, flat: Tensor, place: int) -> None:
        """Bytes, uint8, to a place. In the thread of the writing lane.

        Raises:
            OSError: the disk is full, or took fewer bytes than given.
        """

    def read(self, flat: Tensor, place: int) -> None:
        """Bytes, uint8, from a place. In the thread of the reading lane.

        Raises:
            OSError: the file gave fewer bytes than were written.
        """

    def free_bytes(self) -> int:
        """Room that is left."""

    def close(self) -> None:
        """Once; what was put before is still carried."""


def open_tier(named: str | Path, bytes_per_second: float | None, device: torch.device) -> Tier:
    """
    Args:
        named: a folder on a disk, or "pinned": the host's memory, for a model on a device.
        bytes_per_second: the most carried each way, to try a slower tier; None: as fast as it is.
        device: of the model.

    Raises:
        ValueError: the folder is missing, lies in memory or cannot be written; the host's memory for a model that lies
            there itself.
    """
    if named != PINNED:
        return FileTier(named, bytes_per_second)
    if device.type != "cuda":
        raise ValueError(
            f"residency: tier {PINNED!r} is the host's memory, where a model on {device} lies itself; name a folder on "
            "a disk"
        )
    return PinnedTier(bytes_per_second)


class FileTier:
    """A file without a name in a folder on a disk.

    Raises:
        ValueError: the folder is missing, lies in memory or cannot be written.
    """

    def __init__(self, folder: str | Path, bytes_per_second: float | None = None) -> None:
        self.folder = str(folder)
        self.where = repr(self.folder)
        self._rate = bytes_per_second
        self._file, self.is_direct = _opened(self.folder)
        self._lock = threading.Lock()
        self._end = 0
        self.is_closed = False
        self._free: dict[int, list[int]] = {}
        self.lane_processor_seconds = 0.0
        self._out, self._in = _Buffer(), _Buffer()
        self.writes, self.reads = Lane("writes"), Lane("reads")

    def __enter__(self) -> "FileTier":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.writes.close()
        self.reads.close()
        os.close(self._file)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def take_place(self, nbytes: int) -> int:
        """An offset in the file."""
        size = _whole_blocks(nbytes)
        with self._lock:
            if self._free.get(size):
                return self._free[size].pop()
            offset, self._end = self._end, self._end + size
            return offset

    def give_place(self, place: int, nbytes: int) -> None:
        with self._lock:
            self._free.setdefault(_whole_blocks(nbytes), []).append(place)

    def write(self, flat: Tensor, place: int) -> None:
        began, spent = time.perf_counter(), time.thread_time()
        for at in range(0, len(flat), CHUNK_BYTES):
            part = flat[at : at + CHUNK_BYTES]
            self._out.view[: len(part)].copy_(part)
            size = _whole_blocks(len(part))
            done = os.pwritev(self._file, [memoryview(self._out.memory)[:size]], place + at)
            if done != size:
                raise OSError(errno.EIO, f"the tier took {done} of {size} bytes")
            _wait(self._rate, began, at + len(part))
        self.lane_processor_seconds += time.thread_time() - spent

    def read(self, flat: Tensor, place: int) -> None:
        began, spent = time.perf_counter(), time.thread_time()
        for at in range(0, len(flat), CHUNK_BYTES):
            part = flat[at : at + CHUNK_BYTES]
            size = _whole_blocks(len(part))
            done = os.preadv(self._file, [memoryview(self._in.memory)[:size]], place + at)
            if done != size:
                raise OSError(errno.EIO, f"the tier gave {done} of {size} bytes")
            part.copy_(self._in.view[: len(part)])
            _wait(self._rate, began, at + len(part))
        self.lane_processor_seconds += time.thread_time() - spent


class PinnedTier:
    """The host's memory, page-locked so that a device copies by itself. Places are kept for the next step.

    On a CPU, as in tests, the memory is ordinary.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.where = "the host's memory"
        self.is_direct, self.is_closed = True, False
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._memory: list[Tensor] = []
        self._free: dict[int, list[int]] = {}
        self.lane_processor_seconds = 0.0
        self.writes, self.reads = Lane("writes"), Lane("reads")

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.writes.close()
        self.reads.close()
        self._memory.clear()

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def take_place(self, nbytes: int) -> int:
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            self._memory.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            return len(self._memory) - 1

    def give_place(self, place: int, nbytes: int) -> None:
        with self._lock:
            self._free.setdefault(nbytes, []).append(place)

    def write(self, flat: Tensor, place: int) -> None:
        self._carry(flat, self._memory[place])

    def read(self, flat: Tensor, place: int) -> None:
        self._carry(self._memory[place], flat)

    def _carry(self, source: Tensor, target: Tensor) -> None:
        began, spent = time.perf_counter(), time.thread_time()
        target.copy_(source, non_blocking=True)  # `carry_behind` waits for the stream
        _wait(self._rate, began, len(source))
        self.lane_processor_seconds += time.thread_time() - spent


class _Buffer:
    """Pages of its own, so aligned as O_DIRECT wants it; as memory, and as a tensor of bytes."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, CHUNK_BYTES)
        self.view = torch.frombuffer(self.memory, dtype=torch.uint8)


def moment_of(device: torch.device) -> torch.cuda.Event | None:
    """Where the current stream stands: bytes made, or memory used, until here may be carried behind it. None on a CPU,
    where all that was asked for has ended."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def carry_behind(
    moment: torch.cuda.Event | None, carry: Callable[[Tensor, int], None], flat: Tensor, place: int
) -> None:
    """In a lane's thread: waits for the moment, copies on a stream of its own, and waits for the copy. So whoever
    learns that it has ended may use the bytes on any stream, and let go of the memory they came from."""
    if moment is None:
        carry(flat, place)
        return
    moment.synchronize()
    stream = _stream(flat.device)
    with torch.cuda.stream(stream):
        carry(flat, place)
    stream.synchronize()


_of_thread = threading.local()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The lane's own on this device."""
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def _wait(rate: float | None, began: float, nbytes: int) -> None:
    """Until so many bytes would have been carried at the rate."""
    if rate and (early := nbytes / rate - (time.perf_counter() - began)) > 0:
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


def measure_tier(tier: Tier, device: torch.device, nbytes: int = TRIAL_BYTES) -> TierSpeed:
    """Carries so many bytes out and back, by its lanes. Processor time counts only where no core is idle."""
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    place = tier.take_place(nbytes)
    before = tier.lane_processor_seconds
    seconds = [
        _seconds(lane, carry, flat, place) for lane, carry in ((tier.writes, tier.write), (tier.reads, tier.read))
    ]
    tier.give_place(place, nbytes)
    spent = (tier.lane_processor_seconds - before) / (2 * nbytes)
    return TierSpeed(nbytes / seconds[0], nbytes / seconds[1], 0.0 if _has_idle_core() else spent, tier.is_direct)


def _seconds(lane: Lane, carry: Callable[[Tensor, int], None], flat: Tensor, place: int) -> float:
    done, taken, failed = threading.Event(), [0.0], [None]
    moment = moment_of(flat.device)

    def job() -> None:
        began = time.perf_counter()
        try:
            carry_behind(moment, carry, flat, place)
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
