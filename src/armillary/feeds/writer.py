"""What a running simulation calls: a `Writer` puts snapshots where training takes them.

NumPy and the standard library only; the file stands alone, and may be copied into the source of a solver. Files are the
default store: snapshots then stay on their node and no server copies them. A file is made once and used again, so that
the kernel zeroes no page twice. Its name is its state, and a rename, which is atomic, is the step to the next one:

    free-R-I -> .draft-R-I -> ready-RUN-STEP-R-I -> .held-READER-RUN-STEP-R-I -> free-R-I      slot I of writer R
    .ask-R-0 -> ask-N-R-0 -> .asked-N-R-0 -> .ask-R-0,  .answer-R-0 -> answer-N-R-0 -> ...     its question number N
    writer-R, reader-READER, server: locks, which the kernel drops when their process dies; writer-R is its record too

Source: Balin et al., "In Situ Framework for Coupling Simulation and Machine Learning with Application to CFD" (2023).
Departures: files in the memory of the node instead of a database on it; a snapshot is what one rank of the solver puts
at one step; the solver chooses what happens when nobody takes.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import reduce
from typing import Any, BinaryIO, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np

__all__ = ["Writer"]

Arrays = dict[str, np.ndarray]
Parts = Sequence[bytes | memoryview]
HEADER_BYTES, TAIL_BYTES = 4096, 8
FULL, RUN = ("block", "drop_oldest", "latest"), re.compile(r"[A-Za-z0-9_.]*")
REDIS = ("redis", "rediss")  # schemes of addresses
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 4e-3  # seconds between two looks


class Field(NamedTuple):
    """One array of a snapshot."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Id(NamedTuple):
    """Which snapshot; an ordered stream sorts by it."""

    step: int
    rank: int
    run: str

    def __str__(self) -> str:
        return f"{self.run}-{self.step}-{self.rank}"


class Header(NamedTuple):
    """The first bytes of a snapshot. Of the last one that was put it is the record of its writer, too."""

    id: Id
    ranks: int
    fields: tuple[Field, ...] = ()
    number: int = 0  # stands behind the bytes once more, so a torn snapshot shows two
    crc: int | None = None  # of the bytes, if the writer checks
    error: str = ""  # what an answer has in place of fields
    is_ended: bool = False

    @property
    def nbytes(self) -> int:
        arrays = (np.dtype(one.dtype).itemsize * math.prod(one.shape) for one in self.fields)
        return HEADER_BYTES + sum(arrays) + TAIL_BYTES

    def packed(self) -> bytes:
        text = json.dumps(self).encode()
        if len(text) > HEADER_BYTES - 9:
            raise ValueError(f"put: names and shapes of fields take {len(text)} bytes, want at most 4087; join fields")
        return (b"%08x %s" % (zlib.crc32(text), text)).ljust(HEADER_BYTES)

    @classmethod
    def parse(cls, raw: bytes) -> "Header | None":
        """None: it is not written, or being written."""
        crc, _, text = raw.rstrip().partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            return None
        id, ranks, fields, *others = json.loads(text)
        return cls(Id(*id), ranks, tuple(Field(name, dtype, tuple(shape)) for name, dtype, shape in fields), *others)


class Snapshot(NamedTuple):
    header: Header
    arrays: Arrays


def arrays_of(call: str, fields: Mapping[str, Any]) -> Arrays:
    """Raises ValueError where one cannot be a row of a tensor."""
    arrays = {name: np.asarray(value, order="C") for name, value in fields.items()}
    for name, array in arrays.items():
        dtype = array.dtype
        is_number = dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8) and dtype.isnative
        if not is_number or not array.size:
            raise ValueError(
                f"{call}: field {name!r} is of {dtype} and shape {array.shape}; want bool, integers, floats or complex "
                "numbers of this machine, one at least"
            )
    if not arrays:
        raise ValueError(f"{call}: want one field at least, got none")
    return arrays


def fields_of(arrays: Arrays) -> tuple[Field, ...]:
    return tuple(Field(name, array.dtype.name, array.shape) for name, array in arrays.items())


def views_of(arrays: Arrays) -> list[memoryview]:
    return [array.reshape(-1).view(np.uint8).data for array in arrays.values()]


def crc_of(views: Sequence[memoryview]) -> int:
    return reduce(lambda crc, view: zlib.crc32(view, crc), views, 0)


def parts_of(id: Id, ranks: int, arrays: Arrays, check: bool = False, error: str = "") -> Parts:
    """As it lies in a file: header, the bytes of all fields, the header's number."""
    views, number = views_of(arrays), time.time_ns()
    header = Header(id, ranks, fields_of(arrays), number, crc_of(views) if check else None, error)
    return [header.packed(), *views, number.to_bytes(TAIL_BYTES, "little")]


def opened(path: str, buffering: int = -1) -> Any:
    """To be written in place, made if it is not there: the pages that the file has are used again."""
    return open(path, "r+b", buffering, opener=lambda path, _: os.open(path, os.O_RDWR | os.O_CREAT, 0o644))


def write(path: str, parts: Parts) -> None:
    with opened(path) as file:
        file.writelines(parts)


def new_arrays(header: Header) -> Arrays:
    return {one.name: np.empty(one.shape, one.dtype) for one in header.fields}


def read(file: BinaryIO, place: Callable[[Header], Arrays | None] = new_arrays) -> Snapshot:
    """A snapshot; its bytes go to the arrays of `place`, if it wants them. Raises RuntimeError where it is torn."""
    if (header := Header.parse(file.read(HEADER_BYTES))) is None:
        raise RuntimeError("a snapshot is torn: its header is not whole")
    if (arrays := place(header)) is None:
        return Snapshot(header, {})
    views = views_of(arrays)
    is_whole = all(file.readinto(view) == len(view) for view in views)  # type: ignore[attr-defined]
    if not is_whole or file.read(TAIL_BYTES) != header.number.to_bytes(TAIL_BYTES, "little"):
        raise RuntimeError(f"a snapshot is torn: {header.id} does not end as it begins")
    if header.crc is not None and views and header.crc != crc_of(views):
        raise RuntimeError(f"a snapshot is torn: the checksum of {header.id} is not the one that its writer made")
    return Snapshot(header, arrays)


def renamed(old: str, new: str) -> bool:
    """False: `old` is not there, or no more."""
    try:
        os.rename(old, new)
    except FileNotFoundError:
        return False
    return True


def pauses(patience: float) -> Iterator[float]:
    """Sleeps between the turns of a loop, longer and longer, until patience has gone. Gives the seconds waited."""
    began, pause = time.monotonic(), SHORTEST_PAUSE
    while (waited := time.monotonic() - began) < patience:
        yield waited
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def locked(path: str, kind: int = fcntl.LOCK_EX, looks: int = 50) -> Any:
    """The file, locked until it is closed or this process is dead, however it died. RuntimeError: another has it."""
    file = opened(path, 0)
    for _ in range(looks):  # who only looks holds it for an instant
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.01 if looks > 1 else 0)
    file.close()
    raise RuntimeError(f"{path} is locked: another process has this place; give each process its own")


def is_alive(path: str) -> bool:
    """Whether a process holds that lock."""
    try:
        locked(path, fcntl.LOCK_SH, looks=1).close()
    except RuntimeError:
        return True
    return False


class WriterFiles:
    """A writer's side of a folder."""

    def __init__(self, folder: str, rank: int, keep: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.at, self.rank, self.keep, self.draft, self.turn = f"{folder}/", rank, keep, "", 0
        self.lock = locked(f"{self.at}writer-{rank}")
        for name in self._mine(".draft-"):
            os.rename(self.at + name, f"{self.at}free-{name[7:]}")
        ready = sorted(self._mine("ready-"), key=lambda name: int(name.split("-")[2]))
        self.lying: deque[str] = deque(ready, maxlen=keep)  # oldest first; some are taken meanwhile

    def _mine(self, *kinds: str) -> list[str]:
        mine = [name for name in os.listdir(self.at) if name.startswith(kinds)]
        return [name for name in mine if name.split("-")[-2] == f"{self.rank}"]

    def record(self) -> bytes:
        return os.pread(self.lock.fileno(), HEADER_BYTES, 0)

    def say(self, record: Header) -> None:
        os.pwrite(self.lock.fileno(), record.packed(), 0)

    def left(self) -> int:
        """Own snapshots that nobody took to the end."""
        return len(self._mine("ready-", ".held-"))

    def remove(self, *kinds: str) -> None:
        for name in self._mine(*kinds):
            with contextlib.suppress(FileNotFoundError):  # the server renamed it just now
                os.unlink(self.at + name)

    def clear(self) -> None:
        self.remove("free-", "ready-", ".held-", "stop-")
        self.lying.clear()

    def reserve(self, nbytes: int) -> None:
        """Makes the slots that are not there, with all their pages, so that a full memory is told now."""
        there = {int(name.split("-")[-1]) for name in self._mine("free-", "ready-", ".held-")}
        missing, memory = set(range(self.keep)) - there, os.statvfs(self.at)
        wanted, unused = len(missing) * nbytes, memory.f_bavail * memory.f_frsize
        if wanted > unused:
            raise OSError(
                f"put: {len(missing)} slots in {self.at} want {wanted} bytes, and {unused} are free; "
                "give a smaller keep, or another folder"
            )
        for slot in missing:
            with opened(draft := f"{self.at}.draft-{self.rank}-{slot}") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            os.rename(draft, f"{self.at}free-{self.rank}-{slot}")

    def has_room(self) -> bool:
        """Whether a free slot is now the draft. The one after the last is likeliest, so no folder is listed."""
        for turn in range(0 if self.draft else self.keep):
            slot = f"{self.rank}-{(self.turn + turn) % self.keep}"
            if renamed(f"{self.at}free-{slot}", f"{self.at}.draft-{slot}"):
                self.draft, self.turn = slot, self.turn + turn + 1
                break
        return bool(self.draft)

    def drop(self, but: int = 0) -> bool:
        """Frees the oldest snapshot that nobody took, if more than `but` lie there."""
        while len(self.lying) > but:
            name = self.lying.popleft()
            if renamed(self.at + name, f"{self.at}free-{self.rank}-{name.split('-')[-1]}"):
                return True
        return False

    def put(self, parts: Parts, record: Header) -> None:
        name = f"ready-{record.id}-{self.draft.split('-')[1]}"
        write(f"{self.at}.draft-{self.draft}", parts)
        os.rename(f"{self.at}.draft-{self.draft}", self.at + name)
        self.draft = ""
        self.lying.append(name)
        self.say(record)

    def stop_asked(self, run: str) -> bool:
        return os.path.exists(f"{self.at}stop-{run}-{self.rank}-0")

    def alive(self) -> list[str]:
        return [name for name in os.listdir(self.at) if name[:6] in ("reader", "server") and is_alive(self.at + name)]

    def request(self, number: int, parts: Parts) -> None:
        write(f"{self.at}.ask-{self.rank}-0", parts)
        os.rename(f"{self.at}.ask-{self.rank}-0", f"{self.at}ask-{number}-{self.rank}-0")

    def answer(self, number: int) -> BinaryIO | None:
        done = f"{self.at}.answer-{self.rank}-0"
        return open(done, "rb") if renamed(f"{self.at}answer-{number}-{self.rank}-0", done) else None

    def forget(self) -> None:
        """Questions that nobody waits for any more, and answers."""
        self.remove("ask", ".ask", "answer", ".answer")

    def close(self, record: Header | None) -> None:
        """The last word, if there is one. Free slots go now, others when they are taken."""
        if record and not self.lock.closed:
            self.say(record)
            self.forget()
            self.remove("free-", ".draft-", "stop-")
        self.lock.close()


@dataclass(eq=False)
class Writer:
    """Puts the snapshots of one rank where training takes them, and asks the model that is served there.

        with Writer("/dev/shm/flow", rank=r, ranks=n, keep=16, full="drop_oldest") as w:
            for step in range(steps):
                w.put(step, {"u": u, "p": p})
                if w.stop_asked():
                    break

    Leaving the block says that this writer has ended; an exception does not say so.

    Args:
        store: a folder, best one in memory, or `redis://host:port/name` (extra `armillary[redis]`).
        rank, ranks: of the writers of this store.
        keep: snapshots that may lie there, at least 2; the first `put` takes the memory for them.
        full: when so many lie there, `put` waits ("block"), or drops the oldest; "latest" keeps one only.
        run: its name, without "-". Unnamed, a writer goes on with a run that did not end, or begins a new one.
        restarts: steps may begin again below the last one; no snapshot is taken twice.
        fresh_start: removes what an older run of this writer left.
        patience: seconds that `put` and `ask` wait at most.
        check: makes a checksum of every snapshot, which the reader compares.

    Raises:
        ValueError: an argument is not as above, or snapshots of an older run lie there.
        RuntimeError: another process is this writer.
    """

    store: str
    _: KW_ONLY
    rank: int = 0
    ranks: int = 1
    keep: int = 16
    full: Literal["block", "drop_oldest", "latest"] = "block"
    run: str = ""
    restarts: bool = False
    fresh_start: bool = False
    patience: float = 60.0
    check: bool = False
    dropped: int = field(default=0, init=False)  # snapshots
    waited_seconds: float = field(default=0.0, init=False)  # for room, in `put`
    last_step: int = field(default=-1, init=False)  # of this run; -1: none

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.ranks and self.keep >= 2 and self.full in FULL and RUN.fullmatch(self.run)):
            raise ValueError(
                f"Writer: want 0 <= rank < ranks, keep >= 2, full of {FULL} and a run of letters, digits, '_' and '.'; "
                f"got {self.rank}, {self.ranks}, {self.keep}, {self.full!r}, {self.run!r}"
            )
        self._place: Any = None
        if urlsplit(self.store).scheme in REDIS:
            from armillary.feeds.redis_writer import WriterLists

            self._place = WriterLists(self.store, self.rank, self.keep, self.patience)
        else:
            self._place = WriterFiles(self.store, self.rank, self.keep)
        try:
            self._begin()
        except BaseException:
            self._place.close(None)
            raise

    def _begin(self) -> None:
        old = None if self.fresh_start else Header.parse(self._place.record())
        goes_on = old is not None and (self.run == old.id.run or not (self.run or old.is_ended))
        if not goes_on:
            if not self.fresh_start and (left := self._place.left()):
                raise ValueError(
                    f"Writer: {left} snapshots of an older run{f' {old.id.run}' if old else ''} lie in {self.store}; "
                    "let a stream take them, or remove them with fresh_start=True"
                )
            self._place.clear()
        self.run = old.id.run if old and goes_on else self.run or f"{time.time_ns():x}"
        self._fields = old.fields if old and goes_on else ()
        self.last_step = old.id.step if old and goes_on and not self.restarts else -1
        self._place.forget()
        self._begin_fields()

    def _begin_fields(self) -> None:
        if self._fields:
            self._place.reserve(self._record().nbytes)
        self._place.say(self._record())

    def _record(self, is_ended: bool = False) -> Header:
        return Header(Id(self.last_step, self.rank, self.run), self.ranks, self._fields, is_ended=is_ended)

    def put(self, step: int, fields: Mapping[str, Any]) -> None:
        """Hands one snapshot over. It is copied, so arrays may change when this returns.

        Args:
            step: larger than that of the put before.
            fields: arrays or numbers by name; names, dtypes and shapes are those of the first put.

        Raises:
            ValueError: the step does not grow, or fields differ from the first.
            TimeoutError: with full="block", nobody took a snapshot within `patience`.
            OSError: memory has no place for `keep` snapshots.
        """
        arrays, id = arrays_of("put", fields), Id(int(step), self.rank, self.run)
        found = fields_of(arrays)
        if step <= self.last_step:
            raise ValueError(
                f"put: step {step} of run {self.run} does not come after {self.last_step}; a solver that goes back "
                "says Writer(restarts=True), another run names itself by run=, or clears the store by fresh_start=True"
            )
        if not self._fields:
            self._fields = found
            self._begin_fields()
        elif found != self._fields:
            now, first = ([tuple(one) for one in these] for these in (found, self._fields))
            raise ValueError(f"put: fields of step {step} are {now}; want those of the first put, {first}")
        self._make_room()
        self._place.put(parts_of(id, self.ranks, arrays, self.check), self._record()._replace(id=id))
        self.last_step = id.step
        while self.full == "latest" and self._place.drop(but=1):
            self.dropped += 1

    def _make_room(self) -> None:
        for waited in pauses(self.patience):
            while not (has_room := self._place.has_room()) and self.full != "block" and self._place.drop():
                self.dropped += 1
            if has_room:
                self.waited_seconds += waited
                return
        who = ", ".join(name for name in self._place.alive() if name != "server") or "no reader"
        raise TimeoutError(
            f"put: nobody took a snapshot of writer {self.rank} from {self.store} for {self.patience:g} s; "
            f"{self._place.left()} lie there, {who} is alive; start a stream, or say full='drop_oldest'"
        )

    def stop_asked(self) -> bool:
        """Whether a stream has asked the solver to stop."""
        return bool(self._place.stop_asked(self.run))

    def ask(self, fields: Mapping[str, Any]) -> Any:
        """What the model that `feeds.serve` serves here says of one sample: an array, or arrays by name.

        Raises:
            RuntimeError: nobody serves here, the server died, or the model raised an error, which is quoted.
            TimeoutError: no answer came within `patience`.
        """
        arrays, number = arrays_of("ask", fields), time.time_ns()
        if "server" not in self._place.alive():
            raise RuntimeError(f"ask: nobody serves {self.store}; start feeds.serve(store, model) first")
        self._place.request(number, parts_of(Id(number, self.rank, self.run), self.ranks, arrays))
        is_dead, looked = False, 0.0
        for waited in pauses(self.patience):
            if waited > looked + 0.1:
                is_dead, looked = "server" not in self._place.alive(), waited  # before a last look for the answer
            if file := self._place.answer(number):
                with file:
                    answer = read(file)
                if answer.header.error:
                    raise RuntimeError(f"ask: the model that is served raised {answer.header.error}")
                return answer.arrays.get("", answer.arrays)
            if is_dead:
                break
        self._place.forget()
        if is_dead:
            raise RuntimeError(f"ask: the server of {self.store} died before it answered; ask when one serves again")
        raise TimeoutError(f"ask: the server of {self.store} did not answer for {self.patience:g} s")

    def close(self) -> None:
        """Says that no snapshot follows."""
        self._place.close(self._record(is_ended=True))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._place.close(None if kind else self._record(is_ended=True))
