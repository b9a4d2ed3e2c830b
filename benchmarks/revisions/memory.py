"""Peak memory of two revisions: python -m benchmarks.revisions.memory OLDER [--newer REVISION]

Each trains alone in a job of its own, under the same plan. A rank's peak is the kernel's, above what the process had
before it was attached. Prints a Markdown table: all ranks together, and the fullest. Without --newer, the working tree.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netlab.lab import Lab
from benchmarks.revisions.cases import CASES
from benchmarks.revisions.source import unpack

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes back at once
MIB = 2**20

Peaks = Sequence[int]  # bytes, by rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older")
    parser.add_argument("--newer", default="")
    parser.add_argument("--cases", default="shared N=2,zero_ring N=2,one_device M=2", help="names, parted by commas")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case is called {unknown}; there are {list(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        older, newer = unpack(options.older, Path(folder)), unpack(options.newer, Path(folder))
        told = ["--older", str(older), "--newer", str(newer), *(["--small"] if options.small else [])]
        told += ["--steps", str(options.steps)]
        print(f"{options.newer or 'the working tree'} over {options.older}; MiB at the peak of {options.steps} steps\n")
        print(
            "| case | older, all ranks | newer over older | older over older | fullest rank, older | newer over older |"
        )
        print("| --- " * 6 + "|")
        for name in names:
            by_turns = [_peaks(name, who, told, Path(folder) / "found.json") for who in ("older", "newer", "older")]
            print(row(name, *by_turns), flush=True)


def _peaks(name: str, who: str, told: Sequence[str], out: Path) -> Peaks:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.revisions.memory_job", "--case", name, "--who", who]
    with Lab(CASES[name].workers, CASES[name].mbit_per_second) as lab:
        lab.run([*command, *told, "--out", str(out)], env=MALLOC, timeout_seconds=300, pin=True)
    return [rank["peak"] - rank["before"] for rank in json.loads(out.read_text())["ranks"]]


def row(name: str, older: Peaks, newer: Peaks, again: Peaks) -> str:
    """Of Markdown."""
    return (
        f"| {name} | {sum(older) / MIB:.1f} | {sum(newer) / sum(older):.3f} | {sum(again) / sum(older):.3f} "
        f"| {max(older) / MIB:.1f} | {max(newer) / max(older):.3f} |"
    )


if __name__ == "__main__":
    main()
