"""A shelf of methods: entries by name, one file each, found when somebody first looks.

Every shelf (exchanges, schedules, staleness corrections, codecs) is one of these. A file registers its entry as it is
imported; the shelf imports all files of its package at the first look, so nothing else knows them by name.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from armillary.plans.choice import Choice

__all__ = ["Registry", "examples_of", "guess", "no_entry"]

Entry = TypeVar("Entry")
Aliases = Mapping[str, Mapping[str, Any]]  # short name -> the options that it stands for
NO_ALIASES: Aliases = MappingProxyType({})


class Registry(Generic[Entry]):
    """Entries of one kind.

    Args:
        kind: what an entry is called in messages, as in "dense exchange".
        package: whose modules register entries, as in "armillary.exchanges"; or the one module that does.
    """

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, Choice] = {}
        self._followers: list[Callable[[str, Entry], object]] = []
        self._followed: list[Registry[Any]] = []
        self._is_complete = False

    def register(self, name: str, entry: Entry, aliases: Aliases = NO_ALIASES) -> Entry:
        """
        Args:
            aliases: other names for it, each with the options that it stands for. A registered name outweighs them.

        Raises:
            ValueError: another entry has that name, here or on a shelf that follows this one.
        """
        if name not in self._entries:
            for follow in self._followers:
                follow(name, entry)
        elif self._entries[name] is not entry:
            raise ValueError(f"{self.kind}: {name!r} is registered twice; give one of them another name")
        self._entries[name] = entry
        self._aliases |= {alias: Choice(name, options) for alias, options in aliases.items()}
        return entry

    def follow(self, other: "Registry[Any]", entry_of: Callable[[str, Any], Entry | None]) -> None:
        """What stands on the other shelf stands here too, as `entry_of` makes of it, whenever it was registered; where
        that gives None, it does not.

        Raises:
            ValueError: a name is on both shelves.
        """

        def follow(name: str, entry: Any) -> None:
            if (made := entry_of(name, entry)) is not None:
                self.register(name, made)

        for name, entry in other.all().items():
            follow(name, entry)
        other._followers.append(follow)
        self._followed.append(other)

    def all(self) -> Mapping[str, Entry]:
        """Every entry by name, in the order of names."""
        if not self._is_complete:
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{self.package}."):
                importlib.import_module(module.name)
            self._is_complete = True
        return MappingProxyType(dict(sorted(self._entries.items())))

    def __getitem__(self, name: str) -> Entry:
        """
        Raises:
            ValueError: no such entry; the message lists those that exist, the likeliest first.
        """
        entries = self.all()
        if name not in entries:
            raise ValueError(no_entry(self.kind, name, entries))
        return entries[name]

    def named(self, asked: Choice | str) -> Choice:
        """The same without an alias: the entry's own name, and the options that the alias stands for.

        Args:
            asked: what is on no shelf is given back as it is.

        Raises:
            ValueError: a text that is no choice.
        """
        choice = Choice.parse(asked) if isinstance(asked, str) else asked
        if choice.name in self.all():
            return choice
        meant = next((one for shelf in (self, *self._followed) if (one := shelf._aliases.get(choice.name))), None)
        return choice if meant is None else Choice(meant.name, {**meant.options, **choice.options})

    def __contains__(self, name: object) -> bool:
        return name in self.all()


def no_entry(kind: str, name: str, known: Collection[str]) -> str:
    """What whoever names a method is told that is on no shelf."""
    return f"{kind}: no {kind} {name!r}; there are {', '.join(known)}; {guess(name, known)}"


def guess(name: str, known: Iterable[str]) -> str:
    """What whoever names a method that is on no shelf may have meant, or left out."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else "if it is your own, import its file first (--import FILE)"


def examples_of(decorator: str, given: Iterable[Any]) -> tuple[Mapping[str, Any], ...]:
    """The sets of options that a decorator was given; where there are none, the one without any.

    Raises:
        ValueError: it was given something else: what it should decorate, if it was written without parentheses.
    """
    found = tuple(given)
    for one in found:
        if callable(one):
            name = getattr(one, "__name__", one)
            raise ValueError(
                f"@{decorator} above {name}: it lacks its parentheses; write @{decorator}(), or with options"
            )
        if not isinstance(one, Mapping):
            raise ValueError(f"@{decorator}: want sets of options, as in @{decorator}({{'block': 64}}), got {one!r}")
    return found or ({},)
