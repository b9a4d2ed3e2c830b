"""The command of a benchmark whose page is made of cells: --small, --report, --cells and --only.

Cells that are missing are made and kept, then the page is written and its bars are judged.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.measuring.bars import Bar, missed
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written

__all__ = ["Benchmark", "Found", "command"]

Found = Mapping[str, Mapping[str, Any]]  # by the names of the cells that are made


class Benchmark(NamedTuple):
    """
    Args of note:
        folder: figures.md and results/ lie there.
        settings: what all cells are made with.
        make(cells, is_small, only): makes the cells, each by `cells.once`.
        page(found): its lines and bars.
        parts: what `--only` chooses from.
        images: the folder of Fashion-MNIST, where cells need it.
    """

    folder: Path
    settings: Mapping[str, Any]
    make: Callable[[Cells, bool, str | None], None]
    page: Callable[[Found], tuple[list[str], list[Bar]]]
    parts: Sequence[str] = ()
    images: Path | None = None


def command(says: str | None, benchmark: Benchmark) -> int:
    """The exit code: 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="does it work? Its figures say nothing, and are not kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--cells", type=int, default=0, help="to make at most, then stop; 0: all")
    if benchmark.parts:
        parser.add_argument("--only", choices=benchmark.parts, help="make these cells; the others stay")
    asked = parser.parse_args()
    if not asked.report and benchmark.images and not benchmark.images.is_dir():
        no_images = "no Fashion-MNIST here (apt-get install dataset-fashion-mnist)"
        print(f"{benchmark.folder.name}: SKIPPED, nothing measured: {no_images}")
        return 0
    with TemporaryDirectory() as folder:
        kept = (Path(folder) if asked.small else benchmark.folder) / "results"
        cells = Cells(kept, {"small": asked.small, **benchmark.settings}, asked.cells)
        try:
            if not asked.report:
                benchmark.make(cells, asked.small, asked.only if benchmark.parts else None)
        except Enough:
            pass
        paths = sorted(kept.glob("*/*.json"))
        found = {path.relative_to(kept).with_suffix("").as_posix(): json.loads(path.read_text()) for path in paths}
    lines, bars = benchmark.page(found)
    print("\n".join(lines) if asked.small else written(benchmark.folder, lines))
    return int(bool(missed(bars)))
