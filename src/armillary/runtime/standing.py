"""Where a rank stands: the call it is in, what it waits for there, its step; or since when it has been outside.

To say so costs its rank two attributes; who wants to know reads them from another thread.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

__all__ = ["ABSENT", "CLOSED", "LET_GO", "SILENT", "Stand", "Standing"]

# Ends without an error, and no beginning.
SILENT = "no sign of life"
ABSENT = "has not come"
CLOSED = "has closed its run"
LET_GO = "ended its program, or let go of its run, without run.close()"


@dataclass(frozen=True)
class Stand:
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
    def from_json(text: str) -> "Stand":
        return Stand(**json.loads(text))


class Standing:
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

    def now(self, beat: int = 0, end: str = "") -> Stand:
        """Read while it moves, so two of its words may be of neighbouring moments."""
        wait, waits_since = self.wait
        now = time.monotonic()
        waited = now - waits_since if wait else 0.0
        return Stand(self._call, self._of, wait, waited, self._last, now - self._since, self.step, beat, end)
