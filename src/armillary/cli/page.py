"""Puts a page of paragraphs and tables before the user: drawn on a terminal, as plain text in a file or a pipe."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as DrawnTable

from armillary.facts.table import WIDTH, Part, Picture, Table, page_text, wrapped

__all__ = ["console_here", "put", "tell"]


def console_here(is_aside: bool = False) -> Console:
    """That of stdout, or aside of it on stderr; no wider than a page."""
    console = Console(stderr=is_aside, soft_wrap=True, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def put(console: Console, page: Iterable[Part]) -> None:
    """Prints it, an empty line behind. Where lines can be drawn it is as narrow as the terminal, its first paragraph in
    bold."""
    page = tuple(page)
    if not console.is_terminal:
        console.print(page_text(page) + "\n")
        return
    for place, part in enumerate(page):
        if isinstance(part, Table):
            console.print(_drawn(part, console.width))
        elif isinstance(part, Picture):
            console.print(f"{part}\n")
        else:
            console.print(wrapped(part, console.width) + "\n", style="bold" if place == 0 else None)


def tell(text: str) -> None:
    """A line to who sits there and waits: what takes its time now. A pipe or a file gets none."""
    if (console := console_here(is_aside=True)).is_terminal:
        console.print(text)


def _drawn(table: Table, width: int) -> DrawnTable:
    narrow = table.folded(width)
    drawn = DrawnTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(narrow.header):
        drawn.add_column(head, justify="left" if place in table.left else "right", no_wrap=True)
    for row in narrow.rows:
        drawn.add_row(*row)
    return drawn
