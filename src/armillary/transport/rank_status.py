"""What the ranks of one transport tell one another beside their requests: where they stand, and the first error.

A rank says which call it is in, what it waits for there and its step, or since when it has been outside. It is in the
job's store, so it reaches ranks that wait for a collective. Whoever asks is answered in time or not at all: the store
may be in a process that has stopped.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from armillary.transport.groups import Clients

__all__ = ["ABSENT", "CLOSED", "LET_GO", "SILENT", "CallTracker", "RankStatus", "StatusStore"]

# Ends without an error, and no beginning.
SILENT = "no sign of life"
ABSENT = "has not come"
CLOSED = "has closed its run"
LET_GO = "ended its program, or let go of its run, without run.close()"


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stood at one moment.

    Args:
        call: what the user called, empty outside. of: what of, for example a table.
        wait: the request or message it waits for, empty if it computes; waited_seconds: for how long.
        last: the call before.
        seconds: since it entered the call, or left the last one.
        beat: grows with every moment that is told.
        end: how its program ended, if it did.
    """

    call: str = ""
    of: str = ""
    wait: str = ""
    waited_seconds: float = 0.0
    last: str = ""
    seconds: float = 0.0
    step: int = 0
    beat: int = 0
    end: str = ""

    def __str__(self) -> str:
        ago = f", {self.seconds:.0f} s ago" if not self.call else f", since {self.seconds:.0f} s"
        return self.end or self.place + ago

    @property
    def place(self) -> str:
        """Without the time."""
        return self.end or (f"in {self.where}" if self.call else f"outside armillary since its {self.last or 'start'}")

    @property
    def where(self) -> str:
        """The call, what it waits for and its step."""
        call = f"{self.call} of {self.of}" if self.of else self.call
        return ", ".join(filter(None, [call, self.wait, f"step {self.step}"]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankStatus":
        return RankStatus(**json.loads(text))


class CallTracker:
    """Where this rank stands now. Written by the thread that trains.

    step: optimizer steps taken.
    """

    def __init__(self) -> None:
        self.step = 0
        self._call = self._of = self._last = self._wait = ""
        self._since, self._waits_since = time.monotonic(), 0.0

    @contextmanager
    def within(self, call: str, of: str = "") -> Iterator[None]:
        """Inside, the rank is in that call, unless it is in one already: what the user called counts."""
        if self._call:
            yield
            return
        self._since = time.monotonic()
        self._of, self._call = of, call
        try:
            yield
        finally:
            self._last, self._call, self._of, self._since = call, "", "", time.monotonic()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, the rank waits for that."""
        self._waits_since = time.monotonic()
        self._wait = what
        try:
            yield
        finally:
            self._wait = ""

    @property
    def wait(self) -> tuple[str, float]:
        """What it waits for, empty if nothing, and since when (time.monotonic())."""
        return self._wait, self._waits_since

    def now(self, beat: int = 0, end: str = "") -> RankStatus:
        """Read while it moves, so two of its words may be of neighbouring moments."""
        wait, waits_since = self.wait
        now = time.monotonic()
        waited = now - waits_since if wait else 0.0
        return RankStatus(self._call, self._of, wait, waited, self._last, now - self._since, self.step, beat, end)


ANSWER_SECONDS = 2.0
T = TypeVar("T")


class StatusStore:
    """
    Args:
        clients: of the job's store.
        name: of the transport, the same on its ranks.
    """

    def __init__(self, clients: Clients, name: str, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self._writing, self._store, self._name = clients.writing, clients.asking, name
        self._asking: threading.Thread | None = None
        self._is_lost = False  # the store is gone

    def put(self, stand: RankStatus) -> None:
        """Says where this rank stands. Waits for nobody."""
        self._unless_lost(lambda: self._writing.set(self._key(self.rank), stand.to_json()))

    def stands(self) -> dict[int, RankStatus] | None:
        """By rank, of those on the board; None if the store does not answer."""

        def read() -> dict[int, RankStatus]:
            texts = {rank: self._get(self._key(rank)) for rank in range(self.workers)}
            return {rank: RankStatus.from_json(text) for rank, text in texts.items() if text}

        return self._soon(read)

    def tell(self, error: str) -> str:
        """Leaves word of an error. Returns the first word of any rank, which stays: this or another."""
        return self._soon(lambda: str(self._store.compare_set(self._key("error"), "", error).decode())) or error

    def told(self) -> str:
        """The first word of any rank, empty if there is none."""
        return self._soon(lambda: self._get(self._key("error"))) or ""

    def leave(self, stand: RankStatus) -> None:
        """This rank reads no more; its last stand can still be read. The last to leave wipes the board."""
        self.put(stand)
        self._soon(self._left)

    def withdraw(self) -> None:
        """This rank was never here, and said nothing: for a board whose name is used again."""
        self._soon(lambda: [self._store.delete_key(self._key(what)) for what in (self.rank, "error")])

    def _left(self) -> None:
        if self._store.add(self._key("left"), 1) == self.workers:
            for what in (*range(self.workers), "error", "left"):
                self._store.delete_key(self._key(what))

    def _key(self, what: object) -> str:
        return f"armillary/{self._name}/{what}"

    def _get(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _soon(self, ask: Callable[[], T]) -> T | None:
        """The answer, None if it does not come in time."""
        answers: list[T] = []
        before = self._asking
        if before is not None and before.is_alive():
            before.join(ANSWER_SECONDS)
            if before.is_alive():  # it will be no better now
                return None
        asking = threading.Thread(
            target=lambda: self._unless_lost(lambda: answers.append(ask())), name="armillary-board", daemon=True
        )
        with suppress(RuntimeError):  # no thread begins while the interpreter ends
            asking.start()
            self._asking = asking
            asking.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def _unless_lost(self, act: Callable[[], Any]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except (RuntimeError, ValueError):  # its process has ended
            self._is_lost = True
