"""Work that rank 0 does for everyone: the others get its result, or fail with it instead of waiting for ever."""

from collections.abc import Callable
from typing import TypeVar

from armillary.runtime.transport import Transport

__all__ = ["by_rank_zero"]

Result = TypeVar("Result")


def by_rank_zero(transport: Transport, work: Callable[[], Result]) -> Result:
    """The picklable result of `work`, which only rank 0 runs; every rank must call this.

    Raises:
        ValueError: (other ranks) rank 0 failed; with its message. Rank 0 raises what `work` raised.
    """
    if transport.place.rank > 0:
        fine, answer = transport.share(None)[0]
        if not fine:
            raise ValueError(f"rank 0 failed: {answer}")
        result: Result = answer
        return result
    try:
        made = work()
    except Exception as error:
        transport.share((False, str(error)))
        raise
    transport.share((True, made))
    return made
