"""Shared devices beside N^2 of model parallel x data parallel and a pipeline: python -m benchmarks.cyclic_shared.run

A fresh job for every cell, so that no mode inherits another's memory, on this machine's loopback. Keeps the record
under results/ and writes figures.md of what is kept there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cyclic_memory.run import MALLOC
from benchmarks.cyclic_shared.modes import MODES, forecast
from benchmarks.measuring.page import written
from benchmarks.measuring.ratios import quartiles

HERE = Path(__file__).parent
NAMES = {"replicas": "model parallel x data parallel", "shared": "shared", "pipeline": "pipeline"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,3", help="N, or several")
    parser.add_argument("--slack", type=int, default=0, help="of shared and pipeline")
    parser.add_argument("--samples", type=int, default=2048, help="a micro-batch, an even number")
    parser.add_argument(
        "--stage-seconds", type=float, default=0.2, help="that a stage waits for a micro-batch, forward and backward"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="a round; of 6, 3 devices of a stage run equally many")
    parser.add_argument("--name", default="latest")
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    if not options.report:
        _measure(options)
    print(written(HERE, page(HERE / "results")))


def _measure(options: argparse.Namespace) -> None:
    begun, cells = time.monotonic(), []
    for workers in map(int, options.workers.split(",")):
        for mode in MODES:
            cells.append({"mode": mode, "workers": workers, **_cell(mode, workers, options)})
            print(mode, workers, f"{time.monotonic() - begun:.0f} s so far", flush=True)
    names = ("slack", "samples", "stage_seconds", "rounds", "steps")
    record = {**{name: vars(options)[name] for name in names}, "cells": cells}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{options.name}.json").write_text(json.dumps(record) + "\n")


def _cell(mode: str, workers: int, options: argparse.Namespace) -> dict[str, Any]:
    devices = forecast(mode, workers, options.slack).devices
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    names = ("slack", "samples", "stage_seconds", "rounds", "steps")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(vars(options)[name]))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        words += ["--mode", mode, "--workers", str(workers), "--out", str(out)]
        job = [f"--nproc-per-node={devices}", "-m", "benchmarks.cyclic_shared.job", *words]
        subprocess.run([*launch, *job], check=True, timeout=300, env=os.environ | MALLOC)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def page(results: Path) -> list[str]:
    """A table for each record, in Markdown."""
    lines = ["`python -m benchmarks.cyclic_shared.run`", ""]
    for path in sorted(results.glob("*.json")):
        lines += [*table(json.loads(path.read_text())), ""]
    return lines


def table(record: dict[str, Any]) -> list[str]:
    """Times of the slowest process; shares and memory of the mean and the extreme one."""
    first = record["cells"][0]
    lines = [
        f"{first['machine']}, {record['samples']} samples a micro-batch, stages of {first['layers']} layers and "
        f"{first['weight_bytes'] / 1e6:.1f} MB of weights that wait {record['stage_seconds']} s a micro-batch, slack "
        f"{record['slack']}, {record['rounds']} rounds of {record['steps']} steps.", "",
        "| N | | devices | ms a step: median (quartiles) | samples/s | samples/s a device | busy: mean (least-most) "
        "| busy, forecast | MB of PSS added: mean (worst) | of it activations: mean (worst) | kept, forecast: worst |",
        "|" + " --- |" * 11,
    ]  # fmt: skip
    return [*lines, *(_row(cell, record) for cell in record["cells"])]


def _row(cell: dict[str, Any], record: dict[str, Any]) -> str:
    many, samples = cell["many"], record["samples"]
    said = forecast(cell["mode"], cell["workers"], record["slack"])
    steps = quartiles([max(turn) for turn in zip(*(rank["step_seconds"] for rank in many), strict=True)])
    busy = [rank["busy_seconds"] / statistics.fmean(rank["step_seconds"]) for rank in many]
    rate = cell["workers"] * samples / steps.median
    added = [rank["peak_bytes"] / 1e6 for rank in many]
    # the first half of the samples is taken to weigh what the second half did
    grown = [2 * (rank["peak_bytes"] - one["peak_bytes"]) / 1e6 for one, rank in zip(cell["few"], many, strict=True)]
    return (
        f"| {cell['workers']} | {NAMES[cell['mode']]} | {said.devices} "
        f"| {steps.median * 1e3:.0f} ({steps.first * 1e3:.0f}-{steps.third * 1e3:.0f}) "
        f"| {rate:.0f} | {rate / said.devices:.0f} "
        f"| {statistics.fmean(busy):.0%} ({min(busy):.0%}-{max(busy):.0%}) | {said.busy_share:.0%} "
        f"| {statistics.fmean(added):.0f} ({max(added):.0f}) | {statistics.fmean(grown):.0f} ({max(grown):.0f}) "
        f"| {said.held * cell['activation_bytes'] / 1e6:.0f} |"
    )


if __name__ == "__main__":
    main()
