"""Threads of one process that play ranks.

Cycles are not collected meanwhile. torch reads the random generator's state under a lock of its own and makes a Python
object there; a collection at that place lets go of Python's lock, and a thread that takes it may wait for the other,
so that neither goes on (torch 2.13). Ranks that are processes have a generator each.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["side_by_side"]


def side_by_side(count: int, job: Callable[[int], Any], after: Callable[[], None] = lambda: None) -> list[Any]:
    """Runs job(rank), then after(), in as many threads; their answers in rank order. The first error is raised."""
    answers, errors = [None] * count, list[BaseException]()

    def run(rank: int) -> None:
        try:
            answers[rank] = job(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            after()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    with _without_collections():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return answers


@contextmanager
def _without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
