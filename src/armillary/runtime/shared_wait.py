"""A wait that several threads may enter: one of them waits, all get its answer or its error.

A second wait for one of gloo's receives never ends. Of requests that travel as one, one may be let go, which another
thread then waits for, while the rank itself waits for the next.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["shared_wait"]


def shared_wait(wait: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]) -> Callable[[], Any]:
    """waiting: entered by who comes while another waits."""
    lock, found, errors = threading.Lock(), list[Any](), list[BaseException]()

    def enter() -> None:
        if found or errors:
            return
        try:
            found.append(wait())
        except BaseException as error:  # raised for everyone who waits
            errors.append(error)

    def answer() -> Any:
        if not lock.acquire(blocking=False):
            with waiting():
                lock.acquire()
        try:
            enter()
        finally:
            lock.release()
        if errors:
            raise errors[0]
        return found[0]

    return answer
