"""Where the command `armillary` begins: what it is written with is an extra, which a training image lacks."""

import sys
from importlib.util import find_spec

__all__ = ["main"]

WRITTEN_WITH = ("typer", "rich")


def main() -> None:
    """Runs the command line in sys.argv; or says what to install for it."""
    if missing := [name for name in WRITTEN_WITH if find_spec(name) is None]:
        are = "are" if len(missing) > 1 else "is"
        sys.exit(
            f"armillary: the command needs {' and '.join(missing)}, which {are} not installed: "
            "pip install 'armillary[cli,plot]' (scripts that import armillary do without)"
        )
    from armillary.cli.main import main as run

    run()
