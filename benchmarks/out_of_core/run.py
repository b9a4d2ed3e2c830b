"""Training under a budget of 0.45 of the activations: python -m benchmarks.out_of_core.run

A cell is a process of its own, and is kept under results/. Exit code 1 if a bar is missed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.bars import missed
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written
from benchmarks.out_of_core.figures import Found, bars_of, lines_of
from benchmarks.out_of_core.models import MODELS

HERE = Path(__file__).parent
RATES = (5.0, 0.7, 0.25)
BUDGETS = (("transformer", "ours"), ("transformer", "inductor"), ("transformer", "aot_eager"), ("ResNet-50", "ours"))
LONGEST_SECONDS = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? Tiny batches, nothing is kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--cells", type=int, default=0, help="stop behind so many new cells; 0: all")
    parser.add_argument("--only", default="", help="make only cells whose name holds this")
    parser.add_argument("--tier", default=str(HERE), help="a folder on a disk")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        kept = Path(folder) if options.small else HERE / "results"
        rounds = 1 if options.small else 3
        cells = Cells(kept, {"rounds": rounds, "small": options.small}, options.cells)
        try:
            for name, command in _commands(rounds, options).items():
                if not options.report and options.only in name:
                    cells.once(name, lambda told=command: _told(told))
        except Enough:
            pass
        found = _kept(kept)
        lines = page(kept)
    print("\n".join(lines) if options.small else written(HERE, lines))
    return 1 if missed(bars_of(found)) else 0


def page(results: Path) -> list[str]:
    """Of the cells that are kept."""
    found = _kept(results)
    missing = [name for name in _names() if name not in found]
    return [*lines_of(found), *(["", f"Not measured yet: {', '.join(missing)}."] if missing else [])]


def _names() -> list[str]:
    """Of the cells, in the order of the page."""
    names = [f"{model} {rate:g}" for model in MODELS for rate in RATES]
    return [*names, *(f"budgets {model} {whose}" for model, whose in BUDGETS), "two ranks", "planner"]


def _kept(results: Path) -> dict[str, Found]:
    paths = {name: results / f"{name}.json" for name in _names()}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def _commands(rounds: int, options: Any) -> Mapping[str, Sequence[str]]:
    """By cell, what is run for it."""
    small, tier = ["--small"] * options.small, ["--tier", options.tier]
    commands: dict[str, list[str]] = {}
    for model in MODELS:
        for rate in RATES[:1] if options.small else RATES:
            of = ["--model", model, "--rate", str(rate), "--rounds", str(rounds)]
            commands[f"{model} {rate:g}"] = ["benchmarks.out_of_core.job", *of, *tier, *small]
    for model, whose in BUDGETS[:2] if options.small else BUDGETS:
        of = ["--model", model, "--whose", whose, *["--count", "2"] * options.small]
        commands[f"budgets {model} {whose}"] = ["benchmarks.out_of_core.budgets", *of, *tier, *small]
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    commands["two ranks"] = [*launched, "benchmarks.out_of_core.two_ranks", "--rounds", str(rounds), *tier, *small]
    commands["planner"] = ["benchmarks.out_of_core.chains", *small]
    return commands


def _told(command: Sequence[str]) -> Found:
    whole = [sys.executable, "-W", "ignore", "-m", *command]
    ended = subprocess.run(whole, capture_output=True, text=True, timeout=LONGEST_SECONDS)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(whole)}: {ended.stderr[-2000:]}")
    (line,) = [one for one in ended.stdout.splitlines() if one.startswith("{")]
    found: Found = json.loads(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
