"""A stream's side of a folder, and a server's; `writer.py` says which names files have there, and how they change."""

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from armillary.feeds.writer import (
    HEADER_BYTES,
    Arrays,
    Header,
    Id,
    Parts,
    Snapshot,
    is_alive,
    locked,
    read,
    renamed,
    write,
)

__all__ = ["Look", "ReaderFiles", "Ready", "ServerFiles", "Share", "id_of"]

Place = Callable[[Header], Arrays | None]  # where bytes go; None: nowhere


class Share(NamedTuple):
    """Reader number `reader` of `readers`: it takes the writers r with r % readers == index."""

    reader: int
    readers: int

    def has(self, rank: int) -> bool:
        return rank % self.readers == self.reader


class Ready(NamedTuple):
    """A snapshot that may be taken, and what the store calls it."""

    id: Id
    name: str


class Look(NamedTuple):
    """What lies there, and what the writers had said before: so nothing that they said is missing among `waiting`."""

    records: dict[int, Header]
    waiting: list[Ready]


def id_of(text: str) -> Id:
    """Of RUN-STEP-R."""
    run, step, rank = text.split("-")
    return Id(int(step), int(rank), run)


class ReaderFiles:
    """
    Args of note:
        taken: snapshots that reader number `share.reader` took here, also before it died.
    """

    def __init__(self, folder: str, share: Share) -> None:
        os.makedirs(folder, exist_ok=True)
        self.at, self.share, self.ranks = f"{folder}/", share, 0
        self.lock = locked(f"{self.at}reader-{share.reader}")
        taken, _, last = os.pread(self.lock.fileno(), HEADER_BYTES, 0).decode().rstrip().partition(" ")
        self.taken = int(taken or 0)
        if last and any(str(one.id) == last for one in self._waiting() if one.name.startswith(".held-")):
            self.taken -= 1  # it was counted, and is there to be taken again

    def look(self) -> Look:
        records = self.records()
        return Look({rank: one for rank, one in records.items() if self.share.has(rank)}, self._waiting())

    def records(self) -> dict[int, Header]:
        """What each writer said last, of those that have begun."""
        names = [name for name in os.listdir(self.at) if name.startswith("writer-")]
        found = {int(name.split("-")[1]): record for name in names if (record := self._record(name))}
        self.ranks = found[min(found)].ranks if found else 0  # an older run may have had more
        return {rank: record for rank, record in found.items() if rank < self.ranks}

    def _record(self, name: str) -> Header | None:
        for _ in range(100):  # it may be being written
            with contextlib.suppress(FileNotFoundError), open(self.at + name, "rb", buffering=0) as file:
                if not (raw := file.read(HEADER_BYTES)):
                    return None
                if record := Header.parse(raw):
                    return record
        return None

    def _waiting(self) -> list[Ready]:
        """What is ready, what this reader held when it died, and what dead readers of other shares did."""
        found = []
        for name in os.listdir(self.at):
            if not name.startswith(("ready-", ".held-")) or not self.share.has(int(name.split("-")[-2])):
                continue
            _, *reader, run, step, rank, slot = name.split("-")
            ready = f"ready-{run}-{step}-{rank}-{slot}"
            if reader not in ([], [str(self.share.reader)]):
                if is_alive(f"{self.at}reader-{reader[0]}") or not renamed(self.at + name, self.at + ready):
                    continue
                name = ready
            found.append(Ready(Id(int(step), int(rank), run), name))
        return sorted(found)

    def take(self, waiting: Ready, place: Place) -> Header | None:
        """Held, read, counted, free again. None: it was dropped meanwhile."""
        run, step, rank, slot = waiting.name.split("-")[-4:]
        held = f"{self.at}.held-{self.share.reader}-{run}-{step}-{rank}-{slot}"
        if self.at + waiting.name != held and not renamed(self.at + waiting.name, held):
            return None
        with open(held, "rb", buffering=HEADER_BYTES) as file:
            header = read(file, place).header
        if header.id != waiting.id:
            raise RuntimeError(f"a snapshot is torn: {header.id} lies where {waiting.id} should")
        self.taken += 1
        os.pwrite(self.lock.fileno(), f"{self.taken} {header.id}".ljust(HEADER_BYTES).encode(), 0)
        os.rename(held, f"{self.at}free-{rank}-{slot}")
        return header

    def is_alive(self, rank: int) -> bool:
        return is_alive(f"{self.at}writer-{rank}")

    def stop(self) -> None:
        for rank, record in self.records().items():
            if not record.is_ended:
                write(f"{self.at}stop-{record.id.run}-{rank}-0", [])

    def sweep(self) -> None:
        """At the end of a stream: slots that no writer has any more."""
        for name in os.listdir(self.at):
            if name.startswith("free-") and self.share.has(int(name.split("-")[1])):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.at + name)

    def close(self) -> None:
        self.lock.close()


class ServerFiles:
    """Questions that an earlier server had begun come once more."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.at = f"{folder}/"
        self.lock = locked(f"{self.at}server")
        for name in os.listdir(self.at):
            if name.startswith(".asked-"):
                renamed(self.at + name, f"{self.at}ask-{name[7:]}")

    def questions(self) -> list[Snapshot]:
        """All that wait; the step of each id is the question's number."""
        found = []
        for name in sorted(name for name in os.listdir(self.at) if name.startswith("ask-")):
            begun = f"{self.at}.asked-{name[4:]}"
            if renamed(self.at + name, begun):
                with contextlib.suppress(FileNotFoundError), open(begun, "rb") as file:
                    found.append(read(file))
        return found

    def answer(self, question: Header, parts: Parts) -> None:
        number, rank = question.id.step, question.id.rank
        write(f"{self.at}.answer-{rank}-0", parts)
        renamed(f"{self.at}.answer-{rank}-0", f"{self.at}answer-{number}-{rank}-0")  # unless its writer forgot
        renamed(f"{self.at}.asked-{number}-{rank}-0", f"{self.at}.ask-{rank}-0")

    def close(self) -> None:
        self.lock.close()
