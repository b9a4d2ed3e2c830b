"""Accuracy and bytes of parts trained apart: python -m benchmarks.apart.run

Needs Debian's dataset-fashion-mnist, and for the two hosts root and iproute2. A cell is made once and kept under
results/, so the page may be made over several calls. Exit code 1 if a bar is missed.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.apart.training import NETS, WAYS, trained
from benchmarks.local_losses.nets import FASHION_MNIST
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, Found, command
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SEEDS, MBIT = (0, 1, 2), 10
CHANCE = 10.0  # percent, of ten classes


def _make(cells: Cells, is_small: bool, only: str | None) -> None:
    if only != "hosts":
        for net, seed in [(net, seed) for net in NETS for seed in (SEEDS[:1] if is_small else SEEDS)]:
            for way in WAYS:
                if NETS[net].has(way):
                    cells.once(f"accuracy/{net}, {way}, {seed}", lambda: _trained(net, way, seed, is_small))  # noqa: B023
    if only != "accuracy" and not is_small:
        cells.once(f"hosts/{MBIT}", _on_hosts)


def _trained(net: str, way: str, seed: int, is_small: bool) -> Mapping[str, Any]:
    return {**trained(net, way, seed, is_small), "machine": machine()}


def _on_hosts() -> Mapping[str, Any]:
    with TemporaryDirectory() as folder, Lab(2, MBIT) as lab:
        out = Path(folder) / "found.json"
        job = [sys.executable, "-W", "ignore", "-m", "benchmarks.apart.job", "--out", str(out)]
        lab.run(job, timeout_seconds=600, pin=True)
        return {**json.loads(out.read_text()), "machine": machine()}


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """Tables of the cells that are made, and the bars."""
    lines = [machines(one["machine"] for one in found.values()), "", "## Accuracy", ""]
    lines += ["Percent on the test split: mean over seeds, with the smallest and the largest.", ""]
    lines += ["| net | way | seeds | accuracy, % |", "| --- " * 4 + "|"]
    for net in NETS:
        for way in WAYS:
            those = _of(found, net, way)
            if those:
                spread = f"{statistics.mean(those):.1f} ({min(those):.1f} to {max(those):.1f})"
                lines.append(f"| {net} | {way} | {len(those)} | {spread} |")
    lines += [
        "",
        f"## Two hosts at {MBIT} Mbit/s",
        "",
        "| way | samples a second | MB sent by both |",
        "| --- " * 3 + "|",
    ]
    hosts = found.get(f"hosts/{MBIT}", {}).get("ways", {})
    lines += [f"| {way} | {one['rate']:.0f} | {one['bytes'] / 1e6:.1f} |" for way, one in hosts.items()]
    bars = _bars(found, hosts)
    return [*lines, "", "## Bars", "", *table(bars)], bars


def _bars(found: Found, hosts: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    bars = []
    for net in NETS:
        whole, ours = _of(found, net, "end to end"), _of(found, net, "apart, 2 epochs of recovery")
        lost = [statistics.mean(whole) - statistics.mean(ours)] if len(whole) == len(ours) == len(SEEDS) else []
        if NETS[net].controls:
            says = f"{net}: points below end to end, with 2 epochs of recovery"
            bars.append(Bar(says, "1.0 or less", lost, lambda it: it <= 1.0))
        for way in ("codes drawn anew", "labels permuted"):
            those = _of(found, net, way)
            if NETS[net].has(way):
                far = [max(abs(one - CHANCE) for one in those)] if len(those) == len(SEEDS) else []
                bars.append(Bar(f"{net}, {way}: points from chance", "8 or less", far, lambda it: it <= 8))
    share = [hosts["apart"]["bytes"] / hosts["one_f_one_b"]["bytes"]] if hosts else []
    times = [hosts["apart"]["rate"] / hosts["one_f_one_b"]["rate"]] if hosts else []
    epochs = hosts["apart"]["epochs"] if hosts else 1
    says = f"two hosts: bytes, of one_f_one_b's ({epochs:g} epochs)"
    bars.append(Bar(says, "1 / (2 epochs), within 5 %", share, lambda it: abs(it * 2 * epochs - 1) < 0.05, 3))
    bars.append(Bar("two hosts: times the samples a second of one_f_one_b", "2 or more", times, lambda it: it >= 2))
    return bars


def _of(found: Found, net: str, way: str) -> list[float]:
    cells = [found.get(f"accuracy/{net}, {way}, {seed}") for seed in SEEDS]
    return [one["accuracy"] for one in cells if one]


if __name__ == "__main__":
    sys.exit(command(__doc__, Benchmark(HERE, {}, _make, page, ("accuracy", "hosts"), FASHION_MNIST)))
