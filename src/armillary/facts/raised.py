"""What somebody's own function raised, in words: the error, and the line of theirs that it came from."""

import dataclasses
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Raised", "is_theirs", "said_of", "told"]

P = ParamSpec("P")
R = TypeVar("R")

NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), dataclasses.__file__)


def said_of(error: BaseException) -> str:
    """Who raised what, and where: in the last line that is somebody else's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*NOT_THEIRS, "<"))]
    place = (theirs or frames)[-1]
    first, *more = str(error).split("\n")
    said = f"{place.name} raises {type(error).__name__}: {first} ({place.filename}, line {place.lineno})"
    return "\n".join([said, *more])


class Raised(ValueError):
    """Whose function raised what, and where; the error itself is its cause."""


def is_theirs(function: Any) -> bool:
    """Whether somebody else wrote it, not this package."""
    return f"{getattr(function, '__module__', '')}.".partition(".")[0] != __name__.partition(".")[0]


def told(what: str, call: Callable[P, R]) -> Callable[P, R]:
    """The same function of somebody else's, which says what it is of when it raises.

    Raises:
        Raised: it raised. TypeError: it cannot be called so.
    """

    @wraps(call)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except Raised:
            raise
        except Exception as error:
            if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:
                raise  # the call itself, not what it called
            raise Raised(f"{what}: {said_of(error)}") from error

    return telling
