"""Held-out perplexity and BLEU against time, on the network lab: python -m benchmarks.parallax.curves

DDP over sparse gradients and plans of ours train the same model on the same batches by turns, until all have reached
the same target. A task that is in results/ is not trained again (`--again` does). Prints Markdown, draws
results/curves.png, writes figures.md; ends with 1 if losses differ by more than rounding or a side did not reach the
target. With `--float64` the same in double precision, where rounding is far smaller than any other mistake; into files
of its own.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measuring.bars import missed, table
from benchmarks.netlab.asking import granting
from benchmarks.netlab.lab import Lab
from benchmarks.parallax import page, standings
from benchmarks.parallax.race import Race, load, points
from benchmarks.parallax.tasks import TASKS

__all__ = ["draw"]

HERE = Path(__file__).parent
WORKERS, MBIT = 4, 100.0
COLORS = {"ddp_sparse": "#c2570c", "planned": "#2563a8", "planned_ahead": "#3f9b6c"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="default: all")
    parser.add_argument("--again", action="store_true", help="train what is there already")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--steps", type=int, default=0, help="at most; default: the task's")
    parser.add_argument("--turn-steps", type=int, default=0, help="between evaluations; default: the task's")
    parser.add_argument("--float64", action="store_true", help="train in double precision")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    kind = "_float64" if options.float64 else ""
    paths = {name: options.results / f"curves_{name}{kind}.json" for name in options.task or TASKS}
    for name, path in paths.items():
        if not options.report and (options.again or not path.exists()):
            _train(name, path.resolve(), options)
    races = {name: load(path) for name, path in paths.items() if path.exists()}
    print("\n".join(map(standings.table, races.values())))
    if races:
        draw(races).savefig(options.results / f"curves{kind}.png")
    page.write(options.results)
    bars = [bar for race in races.values() for bar in standings.bars(race)]
    print("\n".join(table(bars)))
    return int(bool(missed(bars)))


def _train(task: str, path: Path, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Lab(WORKERS, MBIT) as lab:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.parallax.curves_job", "--task", task]
        command += ["--float64"] * options.float64
        command += ["--steps", str(options.steps), "--turn-steps", str(options.turn_steps)]
        lab.run(
            [*command, "--mbit", str(MBIT), "--folder", folder, "--out", str(path)],
            timeout_seconds=900,
            pin=True,
            watch=granting(lab.shape, partial(print, flush=True)),
        )
    print(f"{task}: {time.perf_counter() - began:.0f} s in all", flush=True)


def draw(races: Mapping[str, Race]) -> Figure:
    """A row a task and metric: against steps, where all sides should coincide, and against seconds."""
    rows = [(race, metric) for race in races.values() for metric in (race.goal.metric, *race.beside)]
    figure = Figure(figsize=(11, 3.8 * len(rows)), dpi=110, layout="constrained")
    for (by_steps, by_seconds), (race, metric) in zip(figure.subplots(len(rows), 2, squeeze=False), rows):
        for place, (name, curve) in enumerate(race.curves.items()):
            found = points(curve)
            values = [point.metrics[metric] for point in found]
            style = {"color": COLORS.get(name), "marker": "o", "markersize": 3, "label": name}
            wider = 1.2 + 2 * (len(race.curves) - 1 - place)  # what coincides must still be seen
            by_steps.plot([point.step for point in found], values, linewidth=wider, **style)
            by_seconds.plot([point.seconds for point in found], values, linewidth=1.4, **style)
        _label(by_steps, race, metric, "steps")
        _label(by_seconds, race, metric, "seconds of training (evaluation left out)")
    told = next(iter(races.values())).conditions
    figure.suptitle(f"{told['workers']} workers, {told['Mbit/s']:g} Mbit/s links, against steps and against time")
    return figure


def _label(axes: Axes, race: Race, metric: str, of: str) -> None:
    axes.set(xlabel=of, ylabel=f"held-out {metric}", title=race.conditions["task"])
    if metric == race.goal.metric:
        axes.axhline(race.goal.target, color="#777777", linestyle="--", linewidth=1, label=f"{race.goal.target:g}")
        axes.set_yscale("linear" if race.goal.rises else "log")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    raise SystemExit(main())
