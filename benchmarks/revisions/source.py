"""One revision of the library, imported beside others of the same name.

Python knows a module by its name, so two copies of `armillary` cannot both be in `sys.modules`. Inside `with source:`
the name means this copy; outside it means none. Modules that a copy imports late are imported inside, too.
"""

import importlib
import subprocess
import sys
import tarfile
import types
from io import BytesIO
from pathlib import Path
from typing import Any

__all__ = ["Source", "unpack"]

PACKAGE = "armillary"


class Source:
    """
    Args:
        folder: holds `src/armillary`.

    Raises:
        ModuleNotFoundError: it does not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder / "src")
        self._modules: dict[str, types.ModuleType] = {}
        with self:
            self.armillary: Any = importlib.import_module(PACKAGE)
        found = Path(str(self.armillary.__file__)).resolve()
        if not found.is_relative_to(Path(self.folder).resolve()):
            raise ModuleNotFoundError(f"revisions: {self.folder} holds no {PACKAGE}; found that of {found.parent}")

    def __enter__(self) -> "Source":
        sys.path.insert(0, self.folder)
        self._outside = _taken()
        sys.modules.update(self._modules)
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self.folder)
        self._modules = _taken()
        sys.modules.update(self._outside)


def _taken() -> dict[str, types.ModuleType]:
    """All modules of the package, which is then unknown."""
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def unpack(revision: str, into: Path) -> Path:
    """The source of a git revision of this repository; "" is the working tree as it is.

    Raises:
        ValueError: git knows no such revision.
    """
    root = Path(__file__).resolve().parents[2]
    if not revision:
        return root
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=root, capture_output=True)
    if packed.returncode:
        raise ValueError(f"revisions: git archive {revision}: {packed.stderr.decode().strip()}")
    folder = into / revision.replace("/", "_")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder
