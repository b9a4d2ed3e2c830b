"""The page of a benchmark's figures, beside its README: made of the records under results/ alone."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["written"]


def written(folder: Path, lines: Sequence[str]) -> str:
    """The text of the folder's figures.md, now that it is written."""
    text = "\n".join(lines).rstrip() + "\n"
    (folder / "figures.md").write_text(text)
    return text
