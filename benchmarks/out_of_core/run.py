"""Training under a budget of 0.45 of the activations: python -m benchmarks.out_of_core.run

A cell is a model and a tier, in a process of its own, and is kept under results/. Exit code 1 if a bar is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.bars import Bar, missed, table
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machines
from benchmarks.out_of_core.models import MODELS

HERE = Path(__file__).parent
RATES = (5.0, 0.7, 0.25)
MIB = 1 << 20
Found = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? Tiny batches, nothing is kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--cells", type=int, default=0, help="stop behind so many new cells; 0: all")
    parser.add_argument("--tier", default=str(HERE), help="a folder on a disk")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        kept = Path(folder) if options.small else HERE / "results"
        rounds = 1 if options.small else 5
        cells = Cells(kept, {"rounds": rounds, "small": options.small}, options.cells)
        found: dict[str, Found] = {}
        try:
            for model in MODELS:
                for rate in RATES[:1] if options.small else RATES:
                    name = f"{model} {rate:g}"
                    if options.report and not (kept / f"{name}.json").is_file():
                        continue
                    found[name] = cells.once(name, lambda m=model, r=rate: _cell(m, r, rounds, options))
        except Enough:
            pass
    lines, bars = page(found)
    print(written(HERE, lines) if not options.small else "\n".join(lines))
    return 1 if missed(bars) else 0


def _cell(model: str, rate: float, rounds: int, options: Any) -> Found:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.out_of_core.job", "--model", model]
    command += ["--rate", str(rate), "--rounds", str(rounds), "--tier", options.tier, *["--small"] * options.small]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-2000:]}")
    found: Found = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def _median(one: Found, way: str) -> float:
    return statistics.median(one["seconds"][way])


def _best_that_fits(one: Found) -> str:
    fits = [way for way in one["seconds"] if way != "planned" and one["peaks"][way] <= one["budget"]]
    return min(fits, key=lambda way: _median(one, way), default="")


def page(found: Mapping[str, Found]) -> tuple[list[str], list[Bar]]:
    """A table a cell, and the bars."""
    lines = [
        f"Budget: weights, gradients and 0.45 of the activations. {machines(one['machine'] for one in found.values())}"
    ]
    for name, one in found.items():
        keep = _median(one, "keep all")
        counts = {word: one["residencies"].count(word) for word in ("keep", "recompute", "swap")}
        chosen = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        lines += [
            "",
            f"## {name} of the activations a forward second",
            "",
            f"Plan: {chosen}, {one['slots']} slots. Budget {one['budget'] / MIB:.0f} MiB.",
            "",
            "| way | times keeping all | range | peak MiB | fits |",
            "| --- | --- | --- | --- | --- |",
        ]
        for way, seconds in one["seconds"].items():
            spread = f"{min(seconds) / keep:.2f} to {max(seconds) / keep:.2f}"
            fits = "yes" if one["peaks"][way] <= one["budget"] else "no"
            lines.append(
                f"| {way} | {_median(one, way) / keep:.2f} | {spread} | {one['peaks'][way] / MIB:.0f} | {fits} |"
            )
    bars = _bars(found)
    lines += ["", "## Bars", "", *table(bars)]
    return lines, bars


def _bars(found: Mapping[str, Found]) -> list[Bar]:
    those = list(found.values())
    best = [_median(one, _best_that_fits(one)) / _median(one, "planned") for one in those if _best_that_fits(one)]
    hooks = [_median(one, "tutorial's hooks") / _median(one, "planned") for one in those]
    peaks = [one["peaks"]["planned"] / one["budget"] for one in those]
    forecasts = [abs(one["forecast_peak"] / one["peaks"]["planned"] - 1) for one in those]
    slower = [
        (one["forecast_seconds"] / one["forecast_keep_seconds"]) / (_median(one, "planned") / _median(one, "keep all"))
        for one in those
    ]
    rises = [
        max((after[1] - before[1]) / before[1] for before, after in zip(one["ladder"], one["ladder"][1:], strict=False))
        for one in those
    ]
    moved = [one["moved"] / one["forecast_moved"] for one in those if one["forecast_moved"]]

    def of(figures: Sequence[float], one: Callable[[Sequence[float]], float]) -> list[float]:
        return [one(figures)] if figures else []

    return [
        Bar("speed beside the best other way that fits, least", ">= 0.95", of(best, min), lambda one: one >= 0.95),
        Bar("speed beside the tutorial's hooks, mean", ">= 1.3", of(hooks, statistics.mean), lambda one: one >= 1.3),
        Bar("peak of the budget, most", "<= 1", of(peaks, max), lambda one: one <= 1),
        Bar("peak beside its forecast, most, share", "<= 0.02", of(forecasts, max), lambda one: one <= 0.02, 3),
        Bar("forecast of times keeping all, median", "0.85 to 1.15", of(slower, statistics.median), _near),
        Bar("peak over ten falling budgets, most rise", "<= 0", of(rises, max), lambda one: one <= 0),
        Bar("moved bytes beside their forecast, most", "<= 1", of(moved, max), lambda one: one <= 1.0001),
    ]


def _near(one: float) -> bool:
    return 0.85 <= one <= 1.15


if __name__ == "__main__":
    sys.exit(main())
