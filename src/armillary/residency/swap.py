"""What autograd saves in a stage, carried to the tier after the stage's forward and back before its backward.

Source: torch's saved_tensors_hooks. One transfer a storage: what was saved is mostly views of a few. Parameters,
buffers, the stage's input and output, and what is small stay. A storage is held until its stage is left, since an
address that was let go is used again.
"""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from armillary.residency.tier import Tier, carry_behind, moment_of

__all__ = ["SMALL_BYTES", "StageSaves", "Stored", "Waits", "storage_of"]

SMALL_BYTES = 64 << 10


@dataclass
class Waits:
    """What swapping cost compute, and what was carried both ways."""

    seconds: float = 0.0
    moved_bytes: int = 0
    spared_bytes: int = 0  # asked for before they were gone, and so not written or not read


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The bytes that it is a view of; None where it has none of its own, as a sparse tensor or a tensor subclass."""
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return tensor.untyped_storage() if is_plain else None


class Stored:
    """One storage: here, on its way out, away, on its way back, or let go."""

    def __init__(self, stage: str, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.stage, self.nbytes, self.device = stage, storage.nbytes(), tensor.device
        self._flat: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._seen: Tensor | None = tensor.detach()  # it shares the counter of writes
        self._version = tensor._version
        self.takes_left = 0
        self._tier: Tier | None = None
        self._place = 0
        self._lock = threading.Lock()
        self._gone, self._back = threading.Event(), threading.Event()
        self._is_wanted = self._is_dropped = False
        self._error: BaseException | None = None

    def leave(self, tier: Tier, waits: Waits) -> None:
        """To the tier, from now on."""
        self._tier, self._place, self._waits = tier, tier.take_place(self.nbytes), waits
        moment = moment_of(self.device)
        tier.writes.put(lambda: self._write(moment))

    def _write(self, moment: torch.cuda.Event | None) -> None:
        assert self._tier is not None
        flat = self._flat
        if self._is_wanted or self._is_dropped or flat is None:
            self._waits.spared_bytes += self.nbytes
        else:
            try:
                carry_behind(moment, self._tier.write, flat, self._place)
                self._waits.moved_bytes += self.nbytes
            except OSError as error:
                self._error = OSError(
                    error.errno,
                    f"residency: {self.stage!r} could not be swapped out to {self._tier.where}: {error.strerror}",
                )
        with self._lock:
            if self._is_dropped or self._is_wanted:  # nothing will be read from there
                self._tier.give_place(self._place, self.nbytes)
            elif self._error is None:
                self._refuse_written()
                self._flat = None
            self._gone.set()

    def _refuse_written(self) -> None:
        """Notes an error if the bytes are no longer those that were saved. Its tensor is let go."""
        if self._seen is not None and self._seen._version != self._version:
            self._error = _written(self.stage)
        self._seen = None

    def wait_until_gone(self, waits: Waits) -> None:
        if self._tier is not None and not self._gone.is_set():
            began = time.perf_counter()
            self._gone.wait()
            waits.seconds += time.perf_counter() - began
        if self._error is not None:
            raise self._error

    def fetch(self, waits: Waits) -> None:
        """Back, from now on; nothing is carried where the bytes are still here."""
        if self._tier is None:
            return
        with self._lock:
            if self._is_wanted or self._is_dropped or self._error is not None:
                return
            self._is_wanted = True
            if not self._gone.is_set():
                waits.spared_bytes += self.nbytes
                self._back.set()
                return
            if self._tier.is_closed:
                self._error = RuntimeError(
                    f"residency: stage {self.stage!r} is swapped, and its backward came after `with` was left; "
                    "call backward inside"
                )
                self._back.set()
                return
            self._flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            moment = moment_of(self.device)
        self._tier.reads.put(lambda: self._read(moment))

    def _read(self, moment: torch.cuda.Event | None) -> None:
        assert self._tier is not None
        flat = self._flat
        if flat is not None:
            try:
                carry_behind(moment, self._tier.read, flat, self._place)
                self._waits.moved_bytes += self.nbytes
            except OSError as error:
                self._error = OSError(
                    error.errno, f"residency: {self.stage!r} could not be read back: {error.strerror}"
                )
        self._tier.give_place(self._place, self.nbytes)
        self._back.set()

    def take(self, waits: Waits) -> Tensor:
        """The bytes, for one of the tensors that lie in them; let go with the last.

        Raises:
            RuntimeError: it is a second backward, or they were written in place meanwhile.
            OSError: a transfer failed.
        """
        if not self.takes_left:
            raise RuntimeError(
                f"residency: stage {self.stage!r} is swapped, and what it saved was let go after its backward; call "
                f"backward once a forward, or keep the stage by constraints={{{self.stage!r}: 'keep'}}"
            )
        self.fetch(waits)
        if self._tier is not None:
            began = time.perf_counter()
            self._back.wait()
            waits.seconds += time.perf_counter() - began
        with self._lock:
            if self._flat is not None and self._error is None:
                self._refuse_written()
        if self._error is not None:
            raise self._error
        self.takes_left -= 1
        flat = self._flat
        assert flat is not None
        if not self.takes_left:
            self._flat = None
        return flat

    def drop(self) -> None:
        """Its graph went away without a backward."""
        with self._lock:
            if self._tier is None or self._is_dropped or self._is_wanted:
                return
            self._is_dropped = True
            self._flat = None
            if self._gone.is_set():
                self._tier.give_place(self._place, self.nbytes)


def _written(stage: str) -> RuntimeError:
    return RuntimeError(
        f"residency: stage {stage!r} saved a tensor for its backward that was written in place before it was read; "
        f"write to a copy, or keep the stage by constraints={{{stage!r}: 'keep'}}"
    )


@dataclass(frozen=True)
class _Kept:
    """What stays in place of a tensor, with its count of writes: torch does not look at it under hooks."""

    stage: str
    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _View:
    """What autograd keeps in place of a tensor: where it lies. It drops the storage with the last of its views."""

    stored: Stored
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int | torch.SymInt, ...]
    holds: "_Holds"


class _Holds:
    """One for all views of a storage: that it ends says that nothing will ask for the storage again."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __del__(self) -> None:
        self._stored.drop()


@dataclass
class _Entry:
    """A storage seen in the stage that runs: it is held until the stage is left."""

    stored: Stored
    storage: torch.UntypedStorage
    holds: _Holds


@dataclass
class StageSaves:
    """Around one forward of a swapped stage. stays: storages by address that are never carried."""

    stage: str
    stays: Collection[int]
    waits: Waits
    entries: dict[int, _Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "StageSaves":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, at)

    def leave(self, outputs: Collection[int], tier: Tier) -> list[Stored]:
        """Sends away what may go. outputs: storages of what the stage returned, by address; they stay."""
        gone = []
        for address, entry in self.entries.items():
            if address not in outputs:
                entry.stored.leave(tier, self.waits)
                gone.append(entry.stored)
        self.entries.clear()
        return gone

    def _pack(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        if storage is None:
            return tensor
        has_own_bits = not (tensor.is_conj() or tensor.is_neg())  # those of a view are not told by its place
        if storage.nbytes() < SMALL_BYTES or storage._cdata in self.stays or not has_own_bits:
            # Detached: an output that is kept as it is holds the graph that holds it.
            return _Kept(self.stage, tensor.detach(), tensor._version)
        entry = self.entries.get(storage._cdata)
        if entry is None:
            stored = Stored(self.stage, tensor, storage)
            entry = self.entries[storage._cdata] = _Entry(stored, storage, _Holds(stored))
        entry.stored.takes_left += 1
        offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        return _View(entry.stored, tensor.dtype, offset, size, stride, entry.holds)

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _Kept):
            if kept.tensor._version != kept.version:
                raise _written(kept.stage)
            return kept.tensor
        flat = kept.stored.take(self.waits)
        there = torch.empty(0, dtype=kept.dtype, device=flat.device)
        return there.set_(flat.untyped_storage(), kept.offset, kept.size, kept.stride)
