"""Two revisions of this library by turns in one job: python -m benchmarks.revisions.run OLDER [--newer REVISION]

On the network lab, every contender scheduled alike. Prints a Markdown table: newer over older by rounds, beside older
over older, which is what the machine's own unrest does. Without --newer, the working tree as it is. A run of all cases
is kept, and figures.md written.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.netlab.lab import Lab
from benchmarks.revisions.cases import CASES
from benchmarks.revisions.page import keep_steps, steps_head, steps_row
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
    told: dict[str, Any] = {name: getattr(options, name) for name in ("older", "newer", "rounds", "steps")}
    cases: dict[str, Any] = {}
    print("\n".join(steps_head(told)))
    with tempfile.TemporaryDirectory() as folder:
        older, newer = unpack(options.older, Path(folder)), unpack(options.newer, Path(folder))
        words = ["--older", str(older), "--newer", str(newer), *(["--small"] if options.small else [])]
        words += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        for name in names:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.revisions.job", "--case", name, *words]
            case = CASES[name]
            with Lab(case.workers, case.mbit_per_second) as lab:
                lab.run([*command, "--out", str(out)], timeout_seconds=900, pin=True)
            found = json.loads(out.read_text())
            cases[name], told["machine"] = found["rounds"], found["machine"]
            print(steps_row(name, cases[name]), flush=True)
    print(f"\n{told['machine']}")
    if options.cases == "all" and not options.small:
        keep_steps({**told, "cases": cases})


if __name__ == "__main__":
    main()
