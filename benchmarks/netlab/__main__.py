"""Lets the folder be run: `python benchmarks/netlab ...` or `python -m benchmarks.netlab ...`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a folder, Python puts the folder itself here

from benchmarks.netlab.command import main  # noqa: E402  (needs the line above)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
