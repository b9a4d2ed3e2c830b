"""Local steps beside DDP: python -m benchmarks.local_steps.run [--small] [--only quality] [--cells 1] [--report]

Time to an accuracy is steps to it, in one process, times seconds a step, on four hosts of the network lab. Each cell is
made once and kept under results/, so the page may be made over several calls. Exit code 1 if a bar is missed.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.local_steps import quality
from benchmarks.local_steps.training import HOSTS, SPLITS
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, Found, command
from benchmarks.netlab import Lab

HERE = Path(__file__).parent
MBIT, STEPS, EVERY, SEEDS = 20, 384, 32, (0, 1, 2)
REACH = 0.98  # of the way from DDP's first accuracy to its best: what all are timed to
SECONDS = {  # cell -> Mbit/s, contenders, period, steps a turn, turns each
    "DDP": (MBIT, "DDP", 1, 20, 1),
    "H = 1": (MBIT, "ours", 1, 10, 1),
    "H = 8": (MBIT, "ours,PostLocalSGD", 8, 32, 2),
    "H = 32": (MBIT, "ours,PostLocalSGD", 32, 32, 3),
    "H = 128": (MBIT, "ours,PostLocalSGD", 128, 128, 2),
    "PowerSGD": (MBIT, "PowerSGD", 1, 30, 2),
    "DDP, no limit": (0, "DDP", 1, 30, 2),
    "H = 32, no limit": (0, "ours,PostLocalSGD", 32, 32, 2),
    "PowerSGD, no limit": (0, "PowerSGD", 1, 30, 2),
}
LIVE = ("H = 32", 32, 192)  # way, period, steps
EXACT_STEPS = {"PowerSGD": 10}  # that begin it, as DDP's; so its first turn is left out


def _make(cells: Cells, is_small: bool, only: str | None) -> None:
    torch.set_num_threads(1)
    seeds, steps = (SEEDS[:1], 8) if is_small else (SEEDS, STEPS)
    looks = list(range(0, steps + 1, 4 if is_small else EVERY))
    if only != "seconds":
        for split, seed, way in ((split, seed, way) for split in SPLITS for seed in seeds for way in quality.WAYS):
            cells.once(f"quality/{split}; {way}; {seed}", lambda: quality.trained(way, split, seed, looks, is_small))  # noqa: B023
    if only != "quality":
        way, period, steps = LIVE
        cells.once("seconds/live", lambda: _job(MBIT, is_small, ["--live", *_sized(period, steps, 1, is_small)]))
        for name in ("DDP", "H = 32") if is_small else SECONDS:
            mbit, contenders, period, steps, turns = SECONDS[name]
            words = ["--contenders", contenders, *_sized(period, steps, turns, is_small)]
            cells.once(f"seconds/{name}", lambda: _job(mbit, is_small, words))  # noqa: B023


def _sized(period: int, steps: int, turns: int, is_small: bool) -> list[str]:
    numbers = (min(period, 2), 2, 1) if is_small else (period, steps, turns)
    return [word for pair in zip(("--period", "--steps", "--rounds"), map(str, numbers), strict=True) for word in pair]


def _job(mbit: float, is_small: bool, words: Sequence[str]) -> Mapping[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.local_steps.job", *words, *["--small"] * is_small]
    with TemporaryDirectory() as folder, Lab(HOSTS, 0 if is_small else mbit) as lab:
        out = Path(folder) / "found.json"
        lab.run([*command, "--out", str(out)], timeout_seconds=900, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """In Markdown, and the bars."""
    curves = {split: {way: _curve(found, split, way) for way in quality.WAYS} for split in SPLITS}
    seconds = {name: _seconds(found, name) for name in SECONDS}
    lines = ["# Local steps: figures", ""]
    ends, takes = dict[str, float](), dict[str, float]()
    for split, those in curves.items():
        made = {way: curve for way, curve in those.items() if curve}
        if "DDP" not in made:
            continue
        mean = _mean(made["DDP"])
        goal = float(mean[0] + REACH * (mean.max() - mean[0]))
        steps = made["DDP"][0]["steps"]
        lines += [f"## {split}: accuracy after {steps[-1]} steps, in percent; wanted {goal:.2f}", ""]
        lines += [
            "| way | at the end, seed by seed | mean | less DDP | steps to it | s to it at 20 Mbit/s | DDP's over it |"
        ]
        lines += ["|" + " --- |" * 7]
        ddp = math.inf
        for way, curve in made.items():
            last = [one["accuracy"][-1] for one in curve]
            at = _reached(steps, _mean(curve), goal)
            step, exact = next(iter(seconds.get(way, {}).values()), math.nan), EXACT_STEPS.get(way, 0)
            until = (at - exact) * step + exact * seconds["DDP"].get("DDP", 0.0)
            ddp = until if way == "DDP" else ddp
            if split == SPLITS[0]:
                ends[way], takes[way] = statistics.fmean(last), until
            cells = (
                way, ", ".join(f"{one:.2f}" for one in last), f"{statistics.fmean(last):.2f}",
                f"{statistics.fmean(last) - float(mean[-1]):+.2f}", f"{at:.0f}" if math.isfinite(at) else "never",
                _text(until, 1), _text(ddp / until, 1) if until else "-",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## Seconds a step, of the slowest of four hosts",
        "",
        "| cell | contender | ms | kB sent |",
        "|" + " --- |" * 4,
    ]
    for name in SECONDS:
        for contender, turns in found.get(f"seconds/{name}", {}).get("turns", {}).items():
            shown = ", ".join(f"{1e3 * turn['step_seconds']:.1f}" for turn in turns)
            lines.append(f"| {name} | {contender} | {shown} | {turns[-1]['sent_bytes'] / 1e3:,.0f} |")
    bars = _bars(found, ends, takes, seconds)
    return [*lines, "", *table(bars)], bars


def _bars(
    found: Found, ends: Mapping[str, float], takes: Mapping[str, float], seconds: Mapping[str, Mapping[str, float]]
) -> list[Bar]:
    both = [takes[one] for one in ("DDP", "H = 32") if math.isfinite(takes.get(one, math.nan))]
    sooner = [both[0] / both[1]] if len(both) == 2 else []
    below = [ends["DDP"] - ends["H = 32"]] if {"DDP", "H = 32"} <= ends.keys() else []
    peers = {one: seconds[one] for one in ("H = 8", "H = 32", "H = 128") if len(seconds[one]) > 1}
    beside = [one["PostLocalSGD"] / one["ours"] for one in peers.values()]
    bars = [
        Bar("H = 32, time to that accuracy: DDP's over it", "8 or more", sooner, lambda one: one >= 8),
        Bar("points that H = 32 ends below DDP", "1 or less", below, lambda one: one <= 1),
        Bar(f"steps a second over torch's PostLocalSGD, {'; '.join(peers)}", "0.95 or more", beside,
            lambda *those: min(those) >= 0.95),
    ]  # fmt: skip
    live, step = found.get("seconds/live"), seconds["H = 32"].get("ours")
    whole = [live["seconds"] / (live["steps"] * step)] if live and step else []
    return [*bars, Bar("live, H = 32: seconds over the product", "0.9 to 1.1", whole, lambda one: 0.9 <= one <= 1.1)]


def _curve(found: Found, split: str, way: str) -> list[Mapping[str, Any]]:
    """By seed, of those with which every way was trained."""
    seeds = [seed for seed in SEEDS if all(f"quality/{split}; {one}; {seed}" in found for one in quality.WAYS)]
    return [found[f"quality/{split}; {way}; {seed}"] for seed in seeds]


def _mean(curves: Sequence[Mapping[str, Any]]) -> np.ndarray:
    mean: np.ndarray = np.mean([one["accuracy"] for one in curves], 0)
    return mean


def _seconds(found: Found, name: str) -> dict[str, float]:
    """A step's, by contender, ours first."""
    turns = found.get(f"seconds/{name}", {}).get("turns", {})
    return {
        one: statistics.median(turn["step_seconds"] for turn in those[one in EXACT_STEPS :])
        for one, those in turns.items()
    }


def _reached(steps: Sequence[int], values: np.ndarray, goal: float) -> float:
    """The first step at which a curve comes to it, between its looks."""
    if not (values >= goal).any():
        return math.inf
    place = int(np.argmax(values >= goal))
    return float(np.interp(goal, values[place - 1 : place + 1], steps[place - 1 : place + 1])) if place else 0.0


def _text(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


if __name__ == "__main__":
    sys.exit(command(__doc__, Benchmark(HERE, {"mbit": MBIT, "steps": STEPS}, _make, page, ("quality", "seconds"))))
