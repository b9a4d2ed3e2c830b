"""What the ranks of one transport tell one another beside their requests: where they stand, and the first error.

It is in the job's store, so it reaches ranks that wait for a collective. Whoever asks is answered in time or not
at all: the store may be in a process that has stopped.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from armillary.runtime.open_groups import Clients
from armillary.runtime.standing import Stand

__all__ = ["Board"]

ANSWER_SECONDS = 2.0
T = TypeVar("T")


class Board:
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

    def put(self, stand: Stand) -> None:
        """Says where this rank stands. Waits for nobody."""
        self._unless_lost(lambda: self._writing.set(self._key(self.rank), stand.to_json()))

    def stands(self) -> dict[int, Stand] | None:
        """By rank, of those on the board; None if the store does not answer."""

        def read() -> dict[int, Stand]:
            texts = {rank: self._get(self._key(rank)) for rank in range(self.workers)}
            return {rank: Stand.from_json(text) for rank, text in texts.items() if text}

        return self._soon(read)

    def tell(self, error: str) -> str:
        """Leaves word of an error. Returns the first word of any rank, which stays: this or another."""
        return self._soon(lambda: str(self._store.compare_set(self._key("error"), "", error).decode())) or error

    def told(self) -> str:
        """The first word of any rank, empty if there is none."""
        return self._soon(lambda: self._get(self._key("error"))) or ""

    def leave(self, stand: Stand) -> None:
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
