"""Methods by name: a registry of entries, one file each, and a choice of one, typed as it prints.

A `Choice` is the only way a plan points at code. Choices nest: an option may be another choice. The one option that may
go unnamed is `of`, as in hadamard(quantize(bits=4)).

Every shelf (exchanges, schedules, staleness corrections, codecs) is one of these. A file registers its entry as it is
imported; the shelf imports all files of its package at the first look, so nothing else knows them by name.

Calls know their arguments: one that there is not is refused in our words, with those that there are. What somebody's
own function raised is told with the line of theirs that it came from.
"""

import ast
import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = [
    "Choice",
    "Raised",
    "Registry",
    "exact_keywords",
    "examples_of",
    "guess",
    "is_theirs",
    "no_entry",
    "said_of",
    "told",
    "why_not_given",
]

OF = "of"
TOKEN = re.compile(r"""\s*('[^']*'|"[^"]*"|[()\[\],=]|[^\s()\[\],='"]+)""")


NAME = re.compile(r"\w+")  # 1f1b begins with a digit


@dataclass(frozen=True)
class Choice:
    """As in `Choice("ring", {"slack": 1})`, which prints as ring(slack=1)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __new__(cls, *named: Any, **given: Any) -> "Choice":
        if strange := {key: value for key, value in given.items() if key not in ("name", "options")}:
            name = named[0] if named else given.get("name", "NAME")
            raise TypeError(f"Choice: options are given together, as in Choice({name!r}, {strange!r})")
        return super().__new__(cls)

    def __str__(self) -> str:
        inner = ", ".join(_option(key, value) for key, value in self.options.items())
        return f"{self.name}({inner})" if inner else self.name

    def allows(self, other: "Choice") -> bool:
        """Whether the other says no less: options that are left out here stay open."""
        asked = self.options.items()
        return self.name == other.name and all(k in other.options and other.options[k] == v for k, v in asked)

    @classmethod
    def of_fields(cls, given: Mapping[str, Any]) -> "Choice":
        """From what `dataclasses.asdict` makes of it, as JSON holds it."""
        return cls(given["name"], {key: _read_back(value) for key, value in given.get("options", {}).items()})

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """What the text says, as `str` writes it: a value is a literal, a bare word, a list or another choice.

        Raises:
            ValueError: the text is no choice; the message shows where it stops being one.
        """
        tokens, place = [], 0
        while match := TOKEN.match(text, place):
            tokens.append(match[1])
            place = match.end()
        words = _Words(text, [*reversed(tokens)])
        found = words.value()
        if words.left or text[place:].strip():
            words.refuse("nothing more")
        if isinstance(found, cls):
            return found
        if not isinstance(found, str) or not NAME.fullmatch(found):
            words.refuse("a name, as in ring(slack=1)")
        return cls(found)


def _read_back(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_read_back(one) for one in value]
    return Choice.of_fields(value) if isinstance(value, Mapping) and value.keys() == {"name", "options"} else value


def _option(key: str, value: Any) -> str:
    return str(_written(value)) if key == OF and isinstance(value, Choice) else f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, Choice) and not value.options:
        return f"{value}()"  # else it would read back as a word
    return repr(value) if isinstance(value, str) and not _is_word(value) else str(value)


def _is_word(text: str) -> bool:
    """Whether it reads back as itself without quotes."""
    found = TOKEN.fullmatch(text)
    return found is not None and found[1] == text and text not in "()[],=" and _Words(text, [text]).value() == text


@dataclass
class _Words:
    """What is left to read, the next word last."""

    text: str
    left: list[str]

    def refuse(self, wanted: str) -> None:
        at = f"at {self.left[-1]!r}" if self.left else "at its end"
        raise ValueError(f"choice: {self.text!r} is no NAME or NAME(OPTION=VALUE, ...): {at}, want {wanted}")

    def take(self, wanted: str = "") -> str:
        if not self.left or (wanted and self.left[-1] != wanted):
            self.refuse(repr(wanted) if wanted else "a value")
        return self.left.pop()

    def value(self) -> Any:
        word = self.take()
        if word == "[":
            return self.items("]", self.value)
        if word in "()],=":
            self.left.append(word)
            self.refuse("a value")
        if self.left and self.left[-1] == "(":
            self.take("(")
            options = self.items(")", self.option)
            if len(dict(options)) < len(options):
                self.refuse("every option once")
            return Choice(word, dict(options))
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word

    def option(self) -> tuple[str, Any]:
        if len(self.left) > 1 and self.left[-2] == "(":
            return OF, self.value()
        name = self.take()
        self.take("=")
        return name, self.value()

    def items(self, end: str, one: Any) -> list[Any]:
        """As many as there are, with commas between them."""
        found: list[Any] = []
        while self.left and self.left[-1] != end:
            found.append(one())
            if self.left and self.left[-1] != end:
                self.take(",")
        self.take(end)
        return found


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


P = ParamSpec("P")
R = TypeVar("R")


def _not_theirs() -> tuple[str, ...]:
    """What the names of files begin with that nobody else wrote; torch's where it has been imported."""
    torch = sys.modules.get("torch")
    torchs = (str(Path(torch.__file__).parent),) if torch is not None and torch.__file__ else ()
    return str(Path(__file__).parents[1]), dataclasses.__file__, "<", *torchs


def said_of(error: BaseException) -> str:
    """Who raised what, and where: in the last line that is somebody else's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_not_theirs())]
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
