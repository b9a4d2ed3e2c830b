"""Calls that know their arguments: one that there is not is refused in our words, with those that there are."""

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["exact_keywords", "why_not_given"]

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
