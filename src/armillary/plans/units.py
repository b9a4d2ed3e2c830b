"""Pages of paragraphs, tables and figures with units, as plans, profiles and reports print them.

No line is wider than a terminal or a mail shows. It is plain text, so that this room needs no library; who prints to a
terminal may draw a page's tables in another way.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "WIDTH",
    "Page",
    "Part",
    "Picture",
    "Table",
    "bytes_text",
    "count_text",
    "enough_text",
    "page_text",
    "seconds_text",
    "wrapped",
]

WIDTH = 100  # characters of a line
NARROWEST = 8  # to which a column of text is folded
GAP = "  "
NUMBER = re.compile(r"[.,]\d")
MARKS = " ,./_(=:"  # behind which a name may be broken


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header, one unit a column.

    Args of note:
        left: columns of text, which stand to the left and are folded where the page is narrow; numbers are not.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"table: want {len(self.header)} cells in every row, as in the header {self.header}")

    def folded(self, width: int = WIDTH) -> "Table":
        """The same with line breaks in its cells, so that it is no wider than that if numbers allow."""
        widths = self._widths(width)
        return Table(self._folded(self.header, widths), [self._folded(row, widths) for row in self.rows], self.left)

    def __str__(self) -> str:
        """Columns two spaces apart, under a line of dashes."""
        narrow = self.folded()
        lines = [_lines(narrow.header), *(_lines(row) for row in narrow.rows)]
        widths = [max(len(cells[column]) for row in lines for cells in row) for column in range(len(self.header))]
        lines.insert(1, [["-" * width for width in widths]])
        return "\n".join(self._set(cells, widths) for row in lines for cells in row)

    def _set(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        return GAP.join(
            cell.ljust(width) if column in self.left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    def _widths(self, width: int) -> list[int]:
        """Headers of numbers are broken first, which costs one line; then the widest column of text gives way."""
        columns = range(len(self.header))
        widths = [max(len(row[column]) for row in (self.header, *self.rows)) for column in columns]
        numbers = [
            max(map(len, [*head.split(), *(row[column] for row in self.rows)]))
            for column, head in enumerate(self.header)
        ]
        least = [min(widths[column], NARROWEST) if column in self.left else numbers[column] for column in columns]
        for is_text in (False, True):
            those = [column for column in columns if (column in self.left) == is_text]
            while sum(widths) + len(GAP) * (len(widths) - 1) > width:
                wide = [column for column in those if widths[column] > least[column]]
                if not wide:
                    break
                widths[max(wide, key=lambda column: widths[column])] -= 1
        return widths

    def _folded(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        return [
            "\n".join(_broken(cell, widths[column], MARKS if column in self.left else " "))
            for column, cell in enumerate(row)
        ]


@dataclass(frozen=True)
class Picture:
    """Drawn in characters: its lines are never broken, however wide."""

    text: str

    def __str__(self) -> str:
        return self.text


Part = str | Table | Picture
Page = tuple[Part, ...]


def page_text(page: Iterable[Part]) -> str:
    """Paragraphs, tables and pictures with a blank line between; paragraphs are wrapped."""
    return "\n\n".join(wrapped(part) if isinstance(part, str) else str(part) for part in page)


def wrapped(text: str, width: int = WIDTH) -> str:
    """Every line that is too long is broken between words, what follows indented."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines += [line] if len(line) <= width else textwrap.wrap(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def _broken(cell: str, width: int, marks: str) -> list[str]:
    """Behind the last mark that fits, though not behind one within a number; in the midst of a word where there is
    none."""
    lines = []
    while len(cell) > width:
        ends = (at + 1 for at in range(width + 1) if cell[at] in marks and at < width + (cell[at] == " "))
        place = max((end for end in ends if not NUMBER.match(cell, end - 1)), default=width)
        lines.append(cell[:place].rstrip())
        cell = cell[place:].lstrip()
    return [*lines, cell]


def _lines(row: Sequence[str]) -> list[list[str]]:
    """A row of folded cells, line by line."""
    cells = [cell.split("\n") for cell in row]
    height = max(map(len, cells), default=0)
    return [[cell[line] if line < len(cell) else "" for cell in cells] for line in range(height)]


def bytes_text(count: float) -> str:
    """Bytes with three or four digits: 512 B, 31.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def enough_text(count: float) -> str:
    """The same, rounded up, so that as many bytes as it says are enough."""
    unit = 1.0
    while count / unit >= 1024:
        unit *= 1024
    return bytes_text(math.ceil(count / unit * 10 - 1e-9) / 10 * unit if unit > 1 else math.ceil(count))


def count_text(count: float) -> str:
    """A large count in SI units: 970, 1.2 k, 3.4 G."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} P"


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
