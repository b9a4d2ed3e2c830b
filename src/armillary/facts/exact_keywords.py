"""Calls that know their arguments: one that there is not is refused in our words, with the one that was meant."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["exact_keywords"]

P = ParamSpec("P")
R = TypeVar("R")


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
