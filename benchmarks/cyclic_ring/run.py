"""A ring of staggered workers against DDP and one-step-late all-reduce: python -m benchmarks.cyclic_ring.run

On the network lab, on links so slow that DDP's communication alone takes as long as compute does on this machine today.
Keeps the record as JSON and the traffic as PNG under results/ and writes figures.md of what is kept there. With two
workers it ends with 1 if the ring is not as fast as was wanted.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cyclic_ring.modes import LAYERS, WIDTH
from benchmarks.cyclic_ring.traffic import BIN_SECONDS, peak_over_mean
from benchmarks.measuring.bars import Bar, missed
from benchmarks.measuring.bars import table as table_of_bars
from benchmarks.measuring.page import written
from benchmarks.measuring.ratios import Quartiles, over_best, over_each, over_fastest_of_rounds, quartiles
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
RING, LATE = "ring_v1", "delayed"  # the modes of the bars
ALL = "compute,all_reduce,ddp_25mb,ddp_5mb,ddp_2mb,delayed,ring_v1,ring_slack1,ring_slack0"
WANTED_OVER_DDP, WANTED_OVER_DELAYED = 1.2, 0.97  # of the ring with slack N, times as fast
SHOWN_BINS = 80
REACHED = 0.96  # share of a link's speed that gloo's all-reduce reaches, see `all_reduce` in the tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=0, help="of a link; 0: as slow as compute, which is timed first")
    parser.add_argument("--batch", type=int, default=448)
    parser.add_argument("--waiting-seconds", type=float, default=0, help="of a step: layers that wait, not compute")
    parser.add_argument("--stages", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--modes", default=ALL)
    parser.add_argument("--name", default="")
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    out = HERE / "results" / f"{options.name or f'{options.workers}_workers'}.json"
    if not options.report:
        out.parent.mkdir(exist_ok=True)
        if not options.mbit:
            _run(replaced(options, modes="compute"), out)
            options.mbit = as_slow_as(seconds(json.loads(out.read_text()))["compute"], options.workers)
        _run(options, out)
        plot(json.loads(out.read_text()), out.with_suffix(".png"))
    print(written(HERE, page(HERE / "results")))
    return int(bool(missed(bars(out))))


def page(results: Path) -> list[str]:
    """A table and the traffic for each record, and every bar, in Markdown."""
    lines, paths = ["`python -m benchmarks.cyclic_ring.run`", ""], sorted(results.glob("*.json"))
    for path in paths:
        lines += [f"## {path.stem}", "", *table(json.loads(path.read_text())), ""]
        drawn = path.with_suffix(".png")
        lines += [f"![bytes a worker sends per 20 ms](results/{drawn.name})", ""] if drawn.is_file() else []
    return [*lines, "## Bars", "", *table_of_bars([bar for path in paths for bar in bars(path)])]


def bars(path: Path) -> list[Bar]:
    """Of a record of two workers in which both modes ran."""
    record = json.loads(path.read_text())
    if record["conditions"]["workers"] != 2 or not {RING, LATE} <= set(seconds(record)):
        return []
    best, over = over_best(over_each(seconds(record), RING, ddps(record)))
    over_late = over_each(seconds(record), RING, [LATE])[LATE]
    return [
        Bar(f"{path.stem}: {RING}, times as fast as the best DDP ({best})", f"{WANTED_OVER_DDP} or more",
            [statistics.median(over)], lambda it: it >= WANTED_OVER_DDP, 3),
        Bar(f"{path.stem}: {RING}, times as fast as delayed all-reduce", f"{WANTED_OVER_DELAYED} or more",
            [statistics.median(over_late)], lambda it: it >= WANTED_OVER_DELAYED, 3),
    ]  # fmt: skip


def _run(options: argparse.Namespace, out: Path) -> None:
    names = ("mbit", "batch", "waiting-seconds", "stages", "rounds", "steps", "modes")
    words = [word for name in names for word in (f"--{name}", str(vars(options)[name.replace("-", "_")]))]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cyclic_ring.job", *words, "--out", str(out)]
    with Lab(options.workers, options.mbit) as lab:
        lab.run(command, timeout_seconds=900, pin=True, watch=lambda text: print(text, end="", flush=True))


def replaced(options: argparse.Namespace, **others: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **others})


def as_slow_as(compute_seconds: Sequence[float], workers: int) -> float:
    """Mbit/s, to the nearest 10, at which an all-reduce of the gradients takes as long as the median of these."""
    sent_bytes = 2 * (workers - 1) / workers * 4 * LAYERS * (WIDTH + 1) * WIDTH
    return round(sent_bytes * 8e-6 / REACHED / statistics.median(compute_seconds), -1)


def seconds(record: dict[str, Any]) -> dict[str, list[float]]:
    """Of a steady step, by mode, one a round."""
    found: dict[str, list[float]] = {}
    for turn in sorted(record["turns"], key=lambda turn: turn["round"]):
        found.setdefault(turn["mode"], []).append(turn["step_seconds"])
    return found


def ddps(record: dict[str, Any]) -> list[str]:
    return [name for name in seconds(record) if name.startswith("ddp")]


def speedups(record: dict[str, Any]) -> dict[str, Quartiles]:
    """By mode, against the fastest DDP of each round."""
    steps, rivals = seconds(record), ddps(record)
    return {name: quartiles(over_fastest_of_rounds(over_each(steps, name, rivals))) for name in steps}


def table(record: dict[str, Any]) -> list[str]:
    lines = [
        ", ".join(f"{name} {said}" for name, said in record["conditions"].items()) + ".", "",
        f"| mode | ms a step: median (quartiles) | {RING}, times as fast as this: median of rounds "
        "| times as fast as the fastest DDP of each round: median (quartiles) | ms with filling and settling "
        "| MB a host sends: mean (worst) | peak / mean of 20 ms bins: mean (worst) | CPU, ms a rank | loss |",
        "|" + " --- |" * 9,
    ]  # fmt: skip
    of_modes = seconds(record)
    over = over_each(of_modes, RING, list(of_modes)) if RING in of_modes else {}
    for name, ratio in speedups(record).items():
        turns = [turn for turn in record["turns"] if turn["mode"] == name]
        steps = quartiles([turn["step_seconds"] * 1e3 for turn in turns])
        middle = {key: statistics.median(turn[key] for turn in turns) * 1e3 for key in ("whole_seconds", "cpu_seconds")}
        sent = [statistics.fmean(host) / 1e6 for host in zip(*(turn["sent_bytes"] for turn in turns))]
        peaks = [peak_over_mean(bins) for turn in turns for bins in turn["bins"] if sum(bins)]
        evenness = f"{statistics.fmean(peaks):.2f} ({max(peaks):.2f})" if min(sent) > 1 else "-"
        lines.append(
            f"| {name} | {steps.median:.0f} ({steps.first:.0f}-{steps.third:.0f}) "
            f"| {f'{statistics.median(over[name]):.3f}' if over else '-'} "
            f"| {ratio.median:.3f} ({ratio.first:.3f}-{ratio.third:.3f}) | {middle['whole_seconds']:.0f} "
            f"| {statistics.fmean(sent):.2f} ({max(sent):.2f}) | {evenness} | {middle['cpu_seconds']:.0f} "
            f"| {turns[-1]['loss']:.6f} |"
        )
    return lines


def plot(record: dict[str, Any], path: Path) -> None:
    """What host 0 and the last host send over time, a row a mode; the last turn of each."""
    shown = [m for m in dict.fromkeys(t["mode"] for t in record["turns"]) if m not in ("compute", "all_reduce")]
    figure = Figure(figsize=(7, 1.1 * len(shown)))
    rows = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, mode in zip(rows, shown, strict=True):
        turn = [t for t in record["turns"] if t["mode"] == mode][-1]
        for host in (0, len(turn["bins"]) - 1):
            bins = turn["bins"][host][:SHOWN_BINS]
            times = [BIN_SECONDS * place for place in range(len(bins))]
            axes.step(times, [sent / BIN_SECONDS / 1e6 for sent in bins], where="post", lw=0.8, label=f"worker {host}")
        axes.set_title(mode, fontsize=7, loc="left", pad=2)
        axes.tick_params(labelsize=6)
    rows[0].legend(fontsize=6, ncol=2)
    rows[-1].set_xlabel("seconds", fontsize=7)
    figure.supylabel("MB/s sent", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    raise SystemExit(main())
