"""Measures the grid, cell by cell: python -m benchmarks.planner.run

A cell that is in results/ is not measured again (`--again` does); so a run that was stopped goes on where it was. Ends
with the report of the cells that were asked for. Of all that are kept it writes figures.md and results/curve.png. Exit
code 1 if a bar is missed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring.bars import missed
from benchmarks.netlab.lab import Lab
from benchmarks.planner.cells import Cell, grid
from benchmarks.planner.curve import curve
from benchmarks.planner.summary import bars, load, report

HERE = Path(__file__).parent
PICTURE = "curve.png"


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
    kept = _kept(options.results)
    _draw([path for cell, path in kept.items() if cell.ranks_per_host == 1], options.results / PICTURE)
    (options.results.parent / "figures.md").write_text(page(options.results))
    asked = [load(path) for cell, path in kept.items() if cell in cells]
    print(report(asked))
    return int(bool(missed(bars(asked))))


def page(results: Path) -> str:
    """Of all cells that are kept."""
    text = report([load(path) for path in _kept(results).values()])
    if (results / PICTURE).exists():
        text += f"\n![Forecast samples per second by number of workers]({results.name}/{PICTURE})\n"
    return text


def _kept(results: Path) -> dict[Cell, Path]:
    return {cell: path for cell in grid() if (path := results / f"{cell.name}.json").exists()}


def _draw(cells: Sequence[Path], picture: Path) -> None:
    try:
        curve(cells).savefig(picture)
    except ValueError as reason:  # no cell, or cells of an older version, from which nothing can be planned today
        print(f"{picture.name} stays as it was: {reason}")


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
