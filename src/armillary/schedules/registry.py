"""The schedules there are, by name: one more schedule is one more file that registers a factory here."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from armillary.schedules.schedule import Schedule

__all__ = ["Entry", "build", "register", "schedules"]

Factory = TypeVar("Factory", bound=Callable[..., Schedule])


class Entry(NamedTuple):
    """A registered factory, and sets of options that its contract tests use."""

    make: Callable[..., Schedule]
    examples: tuple[Mapping[str, Any], ...]


_ENTRIES: dict[str, Entry] = {}


def register(*examples: Mapping[str, Any]) -> Callable[[Factory], Factory]:
    """Registers a factory under its own name."""

    def enter(make: Factory) -> Factory:
        _ENTRIES[make.__name__] = Entry(make, examples)
        return make

    return enter


def schedules() -> Mapping[str, Entry]:
    """Every schedule there is, by name."""
    package = importlib.import_module("armillary.schedules")
    for module in pkgutil.iter_modules(package.__path__, "armillary.schedules."):
        importlib.import_module(module.name)
    return _ENTRIES


def build(name: str, **options: Any) -> Schedule:
    """
    Raises:
        ValueError: no such schedule, the message lists those that exist; or its options make no possible
            table.
    """
    entries = schedules()
    if name not in entries:
        raise ValueError(f"schedule: no schedule {name!r}; there are {', '.join(sorted(entries))}")
    return entries[name].make(**options)
