"""Where an optimizer keeps a parameter, or numbers for each of its values, besides its groups and its state.

What is exchanged by row is another tensor for the optimizer: this rank's rows, or those that got a gradient. Groups and
state are moved to it. Nobody could move a list of parameters, an inner optimizer, or a dict by parameter of its own.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["kept_elsewhere"]

PLACES = ("param_groups", "state", "step", "zero_grad")  # moved, or wrapped by others
DEEPEST = 6


def kept_elsewhere(optimizer: Optimizer, parameter: Tensor) -> str:
    """The attribute that keeps it; empty if none does."""
    seen: set[int] = set()
    for name, value in vars(optimizer).items():
        if name in PLACES or name.endswith("_hooks"):
            continue
        if any(_is_of(one, parameter) for one in _within(value, optimizer, seen, DEEPEST)):
            return name
    return ""


def _is_of(one: Any, parameter: Tensor) -> bool:
    """The parameter itself, its number, or a tensor of its size."""
    if isinstance(one, Tensor):
        return one is parameter or (parameter.dim() > 0 and one.shape == parameter.shape)
    return isinstance(one, int) and one == id(parameter)


def _within(value: Any, outer: Optimizer, seen: set[int], depth: int) -> Iterator[Any]:
    """What is in a value, however it is nested."""
    if isinstance(value, Tensor | int):
        yield value
        return
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from value.parameters()
        return
    inner: list[Any] = []
    if isinstance(value, Optimizer):
        inner = [group["params"] for group in value.param_groups if not _is_shared(group, outer)]
        inner += [value.state] if value.state is not outer.state else []
        inner += [one for name, one in vars(value).items() if name not in PLACES and not name.endswith("_hooks")]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        inner = list(vars(value).values())
    for one in inner:
        yield from _within(one, outer, seen, depth - 1)


def _is_shared(group: dict[str, Any], outer: Optimizer) -> bool:
    """Its list of parameters is the outer one's, so it changes with that."""
    return any(group["params"] is theirs["params"] for theirs in outer.param_groups)
