"""What a page is to show: each bar, the figure for it, and whether that comes to it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Bar", "missed", "table"]


class Bar(NamedTuple):
    """
    Args of note:
        figures: of the page, one or more; none where a cell that they need is not made yet.
        is_met: whether those are enough.
    """

    says: str
    wanted: str
    figures: Sequence[float]
    is_met: Callable[..., bool]

    @property
    def verdict(self) -> str:
        if not self.figures:
            return "not measured"
        return "pass" if self.is_met(*self.figures) else "**miss**"


def missed(bars: Iterable[Bar]) -> list[Bar]:
    """Not those that are not measured."""
    return [bar for bar in bars if bar.figures and not bar.is_met(*bar.figures)]


def table(bars: Sequence[Bar]) -> list[str]:
    """In Markdown."""
    lines = ["| bar | wanted | found | verdict |", "|" + " --- |" * 4]
    for bar in bars:
        found = ", ".join(f"{figure:.2f}" for figure in bar.figures) or "-"
        lines.append(f"| {bar.says} | {bar.wanted} | {found} | {bar.verdict} |")
    return lines
