"""An error of one rank that must not stop it before the others have heard of it.

A rank that leaves a collective conversation half-way leaves the others waiting for ever. Inside `kept` an error is
remembered and the rank goes on taking part; `agree` then raises on every rank, naming the one that failed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from armillary.runtime.transport import Transport

__all__ = ["FirstError"]


@dataclass(eq=False)
class FirstError:
    """The first error since it was made; for the message, `what` is being done, and what it is `about` once known."""

    what: str
    error: Exception | None = None
    about: str = ""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remembers an error and goes on; what a signal raises (Ctrl-C) is never kept."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def agree(self, transport: Transport, remedy: str = "") -> None:
        """Collective.

        Raises:
            ValueError: some rank met one since this was made; every rank raises, with the first failing rank's words.
            RuntimeError: the same, for any other error.
        """
        mine: tuple[type[Exception], str] | None = None
        about = self.about and f"{self.about}: "
        if isinstance(self.error, ValueError):
            mine = (ValueError, f"{about}{self.error}")
        elif self.error is not None:
            mine = (RuntimeError, f"{about}{type(self.error).__name__}: {self.error}")
        for rank, fault in enumerate(transport.share(mine)):
            if fault is not None:
                kind, text = fault
                raise kind(f"{self.what}: rank {rank}: {text}{remedy and f' ({remedy})'}") from self.error
