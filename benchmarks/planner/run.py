"""Measures the grid, cell by cell: python -m benchmarks.planner.run

A cell that is in results/ is not measured again (`--again` does); so a run that was stopped goes on where it was. Ends
with the report on standard output and the curve in results/curve.png. Exit code 1 if a bar is missed.
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.netlab.lab import Lab
from benchmarks.planner.cells import Cell, grid
from benchmarks.planner.curve import curve
from benchmarks.planner.summary import load, misses, report

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name contains this, as _8_ or vision")
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the turns of one cell, roughly")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--small", action="store_true", help="one cell of hosts of two ranks, kept nowhere")
    options = parser.parse_args()
    if options.small:
        return _small()
    options.results.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in grid() if options.only in cell.name]
    for number, cell in enumerate(cells, 1):
        path = options.results / f"{cell.name}.json"
        if options.report or (path.exists() and not options.again):
            continue
        began = time.perf_counter()
        _measure(cell, path, options.seconds)
        print(f"{number}/{len(cells)} {cell.name}: {time.perf_counter() - began:.0f} s", flush=True)
    paths = {cell: path for cell in cells if (path := options.results / f"{cell.name}.json").exists()}
    found = [load(path) for path in paths.values()]
    print(report(found))
    if drawn := [path for cell, path in paths.items() if cell.ranks_per_host == 1]:
        curve(drawn).savefig(options.results / "curve.png")
    missed = misses(found)
    print("\n".join(f"missed: {bar}" for bar in missed) or "every bar is met")
    return int(bool(missed))


def _small() -> int:
    """Whether everything works; what it measures means nothing."""
    cell = next(cell for cell in grid() if cell.ranks_per_host > 1 and cell.workload == "vision")
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{cell.name}.json"
        _measure(cell, path, 0.5)
        print(report([load(path)]))
    return 0


def _measure(cell: Cell, path: Path, seconds: float) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner.job", "--workload", cell.workload]
    with Lab(cell.hosts, cell.mbit_per_second) as lab:
        lab.run(
            [*command, "--seconds", str(seconds), "--out", str(path)],
            ranks_per_host=cell.ranks_per_host,
            timeout_seconds=300,
            pin=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
