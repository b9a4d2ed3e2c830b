"""Two revisions of this library by turns in one job: python -m benchmarks.revisions.run OLDER [--newer REVISION]

On the network lab, every contender scheduled alike. Prints a Markdown table: newer over older by rounds, beside older
over older, which is what the machine's own unrest does. Without --newer, the working tree as it is.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.netlab.lab import Lab
from benchmarks.revisions.cases import CASES
from benchmarks.revisions.source import unpack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older")
    parser.add_argument("--newer", default="")
    parser.add_argument("--cases", default=",".join(name for name in CASES if "," not in name), help="names, or 'all'")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = list(CASES) if options.cases == "all" else options.cases.split(";" if ";" in options.cases else ",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case is called {unknown}; there are {list(CASES)} (part names that hold a comma by ;)")
    with tempfile.TemporaryDirectory() as folder:
        older, newer = unpack(options.older, Path(folder)), unpack(options.newer, Path(folder))
        told = ["--older", str(older), "--newer", str(newer), *(["--small"] if options.small else [])]
        told += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        print(f"{options.newer or 'the working tree'} over {options.older}; {options.rounds} rounds of "
              f"{options.steps} steps\n")  # fmt: skip
        print("| case | older, ms a step | newer over older: median (lowest-highest) | older over older |")
        print("| --- | --- | --- | --- |")
        for name in names:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.revisions.job", "--case", name, *told]
            case = CASES[name]
            with Lab(case.workers, case.mbit_per_second) as lab:
                lab.run([*command, "--out", str(out)], timeout_seconds=900, pin=True)
            found = json.loads(out.read_text())
            print(row(name, found["rounds"]), flush=True)
    print(f"\n{found['machine']}")


def row(name: str, rounds: Sequence[Mapping[str, float]]) -> str:
    """Of Markdown; ratios are of one round."""
    older = statistics.median(turn["older"] for turn in rounds)
    newer, again = ([turn[who] / turn["older"] for turn in rounds] for who in ("newer", "older again"))
    return f"| {name} | {1e3 * older:.1f} | {_spread(newer)} | {_spread(again)} |"


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
