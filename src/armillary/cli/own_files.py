"""Files of the user's own that a command imports first: codecs, exchanges and schedules that register themselves.

They are imported while the command line is read. Workers are given the same command line, so each of them imports the
same files, before anything is planned.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from armillary.cli.refusal import refusing

__all__ = ["import_own", "look_in"]


def import_own(named: Sequence[str]) -> list[str]:
    """Imports files by their paths, and modules by their names; a refusal ends the process.

    A file is imported under its own name, so whoever else writes `import my_codecs` gets the same one.
    """
    for name in named:
        with refusing():
            (_import_file if name.endswith(".py") else _import_module)(name)
    return list(named)


def look_in(folder: Path) -> None:
    """Lets Python find what lies in this folder, as beside a script that it runs; that hides nothing else."""
    if (found := str(folder.resolve())) not in sys.path:
        sys.path.append(found)


def _import_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--import: no file {name}; pass the path of a .py file, or a module's name")
    look_in(path.parent)
    found = importlib.import_module(path.stem).__file__
    if found is None or not path.samefile(found):
        raise ValueError(f"--import: Python has another module {path.stem}, {found}; give {name} another name")


def _import_module(name: str) -> None:
    look_in(Path())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        wanted = "pass the path of a .py file, or a module's name"
        raise ValueError(f"--import: no module {name!r}; {wanted}") from None
