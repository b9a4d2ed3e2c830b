"""Accuracy, bytes and pipelines of local losses: python -m benchmarks.local_losses.run

Needs Debian's dataset-fashion-mnist, and for a shaped link root and iproute2. A cell is made once and kept under
results/, so the page may be made over several calls. Exit code 1 if a bar is missed.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.local_losses.accuracy import WAYS, step_bytes, trained
from benchmarks.local_losses.nets import FASHION_MNIST
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, Found, command
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SEEDS, IMAGES, EPOCHS = (0, 1, 2), 10_000, 6
WANTED_WAYS = ("backpropagation", "local", "frozen lower part")  # made first
OURS, EXACT, TORCH, CYCLIC = "local_losses", "one_f_one_b", "torch Schedule1F1B", "cyclic pipeline"
LINKS = (0, 25)  # Mbit/s; 0: loopback. At 25 an activation is as long on the link as a stage computes
ROUNDS = 8


def _make(cells: Cells, is_small: bool, only: str | None) -> None:
    images, epochs, seeds = (256, 1, SEEDS[:1]) if is_small else (IMAGES, EPOCHS, SEEDS)
    if only != "speed":
        cells.once("bytes/step", lambda: {"bytes": step_bytes(images), "machine": machine()})
        others = [way for way in WAYS if way not in WANTED_WAYS]
        for way, seed in [(way, seed) for seed in seeds for way in WANTED_WAYS] + [
            (way, seed) for way in others for seed in seeds
        ]:
            cells.once(f"accuracy/{way}, {seed}", lambda: {**trained(way, seed, images, epochs), "machine": machine()})  # noqa: B023
    if only != "accuracy":
        for mbit in LINKS[:1] if is_small else LINKS:
            cells.once(f"speed/{mbit}", lambda: _pipelines(mbit, is_small))  # noqa: B023


def _pipelines(mbit: int, is_small: bool) -> Mapping[str, Any]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        job = ["-m", "benchmarks.local_losses.job", "--out", str(out)]
        job += ["--rounds", "1" if is_small else str(ROUNDS), "--steps", "2" if is_small else "5"]
        if mbit:
            with Lab(2, mbit) as lab:
                lab.run([sys.executable, "-W", "ignore", *job], timeout_seconds=600, pin=True)
        else:
            launch = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
            ]
            subprocess.run([*launch, *job], check=True, timeout=600)
        return {**json.loads(out.read_text()), "machine": machine()}


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """Tables of the cells that are made, and the bars."""
    lines = [machines(one["machine"] for one in found.values()), "", "## Accuracy", ""]
    lines += [f"ResNet-20-shaped, {IMAGES} images of Fashion-MNIST at 16 x 16, {EPOCHS} epochs, cut at `layer2`.", ""]
    lines += [
        "| way | seeds | accuracy, %: mean (range) | at the seconds of the quickest | s a training |",
        "| --- " * 5 + "|",
    ]
    least = min((one["epochs"][-1][0] for name, one in found.items() if name.startswith("accuracy/")), default=0.0)
    for way in WAYS:
        those = [found[f"accuracy/{way}, {seed}"] for seed in SEEDS if f"accuracy/{way}, {seed}" in found]
        if those:
            last = [one["epochs"][-1][1] for one in those]
            early = [_at(one["epochs"], least) for one in those]
            seconds = statistics.mean(one["epochs"][-1][0] for one in those)
            lines.append(f"| {way} | {len(those)} | {_spread(last)} | {_spread(early)} | {seconds:.0f} |")
    lines += ["", "## Bytes of a step", "", "The most bytes of tensors that a step of 64 images makes.", ""]
    step = found.get("bytes/step", {}).get("bytes", {})
    lines += ["| way | MB | of backpropagation's |", "| --- " * 3 + "|"]
    lines += [f"| {way} | {many / 1e6:.1f} | {many / step['backpropagation']:.2f} |" for way, many in step.items()]
    lines += ["", "## Two workers, two micro-batches", "", "Perceptron blocks of 768, 64 samples a micro-batch.", ""]
    lines += [
        "| link | pipeline | ms a step: median (quartiles) | local_losses, times as fast | kB sent a step, both ways |",
        "| --- " * 5 + "|",
    ]
    for mbit in LINKS:
        one = found.get(f"speed/{mbit}")
        for name, steps in one["seconds"].items() if one else ():
            first, middle, third = statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3
            times = statistics.median(other / mine for other, mine in zip(steps, one["seconds"][OURS], strict=True))
            says = f"{mbit} Mbit/s" if mbit else "loopback"
            lines.append(
                f"| {says} | {name} | {1e3 * middle:.0f} ({1e3 * first:.0f}-{1e3 * third:.0f}) | {times:.2f} "
                f"| {one['bytes'][name] / 1e3:.0f} |".replace("| -0 |", "| not counted |")
            )
    bars = _bars(found)
    return [*lines, "", "## Bars", "", *table(bars)], bars


def _bars(found: Found) -> list[Bar]:
    def last(way: str) -> list[float]:
        cells = [found.get(f"accuracy/{way}, {seed}") for seed in SEEDS]
        return [one["epochs"][-1][1] for one in cells if one] if all(cells) else []

    whole, local, frozen = (last(way) for way in WANTED_WAYS)
    lost = [statistics.mean(whole) - statistics.mean(local)] if whole and local else []
    above = [min(a - b for a, b in zip(local, frozen, strict=True))] if local and frozen else []
    step = found.get("bytes/step", {}).get("bytes")
    share = [step["local"] / step["backpropagation"]] if step else []
    bars = [
        Bar("points below backpropagation, mean of seeds", "2.0 or less", lost, lambda it: it <= 2.0),
        Bar("points above a frozen lower part, the worst seed", "above 0", above, lambda it: it > 0.0),
        Bar("bytes of a step, of backpropagation's", "0.65 or less", share, lambda it: it <= 0.65),
    ]
    one = found.get("speed/0", {}).get("seconds")
    for peer in (EXACT, TORCH):
        times = [statistics.median(a / b for a, b in zip(one[peer], one[OURS], strict=True))] if one else []
        bars.append(Bar(f"loopback: times as fast as {peer}", "1.2 or more", times, lambda it: it >= 1.2))
    for mbit in LINKS:
        sent = found.get(f"speed/{mbit}", {}).get("bytes")
        half = [sent[OURS] / sent[EXACT]] if sent else []
        bars.append(Bar(f"link {mbit}: bytes sent, of {EXACT}'s", "0.5", half, lambda it: abs(it - 0.5) < 0.02))
    return bars


def _at(epochs: list[list[float]], seconds: float) -> float:
    """Accuracy behind the last epoch that ended in this time, or behind the first."""
    return [accuracy for spent, accuracy in epochs if spent <= seconds or spent == epochs[0][0]][-1]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(
        command(
            __doc__,
            Benchmark(HERE, {"images": IMAGES, "epochs": EPOCHS}, _make, page, ("accuracy", "speed"), FASHION_MNIST),
        )
    )
