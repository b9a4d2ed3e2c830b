"""A name in a registry with its options: the only way a plan points at code. It is typed as it prints.

Choices nest: an option may be another choice. The one option that may go unnamed is `of`, as in
hadamard(quantize(bits=4)).
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice"]

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
