"""The error that ends this rank's program, told to the others before Python prints it: sys.excepthook, handed on.

What a launcher wants to know (TORCHELASTIC_ERROR_FILE) is torch's `record` to write, which the user's main function
may have: two writers of one file would contradict each other.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType

__all__ = ["LastWords"]


class LastWords:
    """In force until `remove`. tell: is given one line."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell: Callable[[str], object] | None = tell
        self._process = os.getpid()  # not of a process that was forked from this one
        self._before = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._tell is not None and os.getpid() == self._process:
            self._tell(f"{kind.__name__}: {error}")
        self._before(kind, error, trace)

    def remove(self) -> None:
        """The hook before is in force again; where somebody else's has been put before this one, this does nothing."""
        self._tell = None
        while isinstance(sys.excepthook, LastWords) and sys.excepthook._tell is None:
            sys.excepthook = sys.excepthook._before
