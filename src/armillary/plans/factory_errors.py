"""Calls that know their arguments: one that there is not is refused in our words, with those that there are.

What somebody's own function raised, in words: the error, and the line of theirs that it came from.
"""

import dataclasses
import difflib
import inspect
import traceback
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Raised", "exact_keywords", "is_theirs", "said_of", "told", "why_not_given"]

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


def exact_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """The same call, which raises TypeError for a keyword that it does not have."""
    known = list(inspect.signature(call).parameters)

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                raise TypeError(f"{call.__name__}: there is no argument {name!r}; {meant}")
        return call(*args, **kwargs)

    return checked


def why_not_given(make: Callable[..., Any], options: Collection[str]) -> str:
    """What speaks against a call with options of these names: one that it does not have, or one that it lacks."""
    parameters = inspect.signature(make).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return ""
    if strange := [name for name in options if name not in parameters]:
        return f"it has no {', '.join(strange)}; it may have {', '.join(parameters) or 'no options'}"
    needed = [
        name for name, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_POSITIONAL
    ]
    lacking = [repr(name) for name in needed if name not in options]
    return f"it wants {', '.join(lacking)}" if lacking else ""
