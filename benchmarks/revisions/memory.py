"""Peak memory of two revisions: python -m benchmarks.revisions.memory OLDER [--newer REVISION]

Each trains alone in a job of its own, under the same plan. A rank's peak is the kernel's, above what the process had
before it was attached. Prints a Markdown table: all ranks together, and the fullest. Without --newer, the working tree.
A run of the usual cases is kept, and figures.md written.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netlab.lab import Lab
from benchmarks.revisions.cases import CASES
from benchmarks.revisions.page import keep_memory, memory_head, memory_row
from benchmarks.revisions.source import unpack

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes back at once
USUAL = "shared N=2,zero_ring N=2,one_device M=2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older")
    parser.add_argument("--newer", default="")
    parser.add_argument("--cases", default=USUAL, help="names, parted by commas")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case is called {unknown}; there are {list(CASES)}")
    told: dict[str, Any] = {name: getattr(options, name) for name in ("older", "newer", "steps")}
    cases: dict[str, Any] = {}
    print("\n".join(memory_head(told)))
    with tempfile.TemporaryDirectory() as folder:
        older, newer = unpack(options.older, Path(folder)), unpack(options.newer, Path(folder))
        words = ["--older", str(older), "--newer", str(newer), *(["--small"] if options.small else [])]
        words += ["--steps", str(options.steps)]
        for name in names:
            turns = [_found(name, who, words, Path(folder) / "found.json") for who in ("older", "newer", "older")]
            cases[name] = [[rank["peak"] - rank["before"] for rank in turn["ranks"]] for turn in turns]
            told["machine"] = turns[0]["machine"]
            print(memory_row(name, cases[name]), flush=True)
    print(f"\n{told['machine']}")
    if options.cases == USUAL and not options.small:
        keep_memory({**told, "cases": cases})


def _found(name: str, who: str, words: Sequence[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.revisions.memory_job", "--case", name, "--who", who]
    with Lab(CASES[name].workers, CASES[name].mbit_per_second) as lab:
        lab.run([*command, *words, "--out", str(out)], env=MALLOC, timeout_seconds=300, pin=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
