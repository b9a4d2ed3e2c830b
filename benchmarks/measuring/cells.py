"""The cells of a page: each a file, made once, and all of a folder by the same settings.

So a page is made over several evenings, and no figure of a shorter or smaller run is taken for one of the page.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Cells", "Enough"]

SETTINGS = "settings.json"


class Enough(Exception):
    """As many cells as were asked for are made."""


class Cells:
    """
    Args:
        settings: what every cell of the folder is made with; where it is resumed it must be the same.
        at_most: cells to make, then `Enough` is raised before the next; 0: all.

    Raises:
        ValueError: the folder holds cells of other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], at_most: int = 0) -> None:
        self.folder, self._left = folder, at_most or -1
        kept, mine = folder / SETTINGS, json.dumps(settings, sort_keys=True)
        if kept.is_file() and kept.read_text().strip() != mine:
            raise ValueError(
                f"cells: {folder} holds figures made with {kept.read_text().strip()}, this run has {mine}; "
                "go on with those settings, or name another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(mine + "\n")

    def once(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The cell of that name; made if it is not kept.

        Raises:
            Enough: it is one too many.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            if not self._left:
                raise Enough
            self._left -= 1
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(make()) + "\n")
            print(f"made {name}", flush=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
