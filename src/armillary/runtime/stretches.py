"""What the thread that trains does by itself between the answers it waits for, while somebody wants to know."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Stretch", "Stretches"]


class Stretch(NamedTuple):
    """What was done without a wait, and then how long an answer of that label was waited for; none at the end."""

    own_seconds: float
    label: str = ""
    waited_seconds: float = 0.0


class Stretches:
    """Off until `begin`, off again after `end`. Waits of other threads hold nobody up."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._answered = 0.0
        self._found: list[Stretch] = []

    def begin(self) -> None:
        self._thread, self._answered, self._found = threading.get_ident(), time.perf_counter(), []

    def end(self) -> None:
        self._thread = None

    def take(self) -> tuple[Stretch, ...]:
        """Those since `begin` or the last `take`; the last one ends now."""
        now = time.perf_counter()
        taken = (*self._found, Stretch(now - self._answered))
        self._answered, self._found = now, []
        return taken

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Around a wait for an answer."""
        asked = time.perf_counter()
        yield
        if self._thread == threading.get_ident():
            now = time.perf_counter()
            self._found.append(Stretch(asked - self._answered, label, now - asked))
            self._answered = now
