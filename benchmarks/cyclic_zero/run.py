"""`zero_ring` against FSDP2, one unit a stage, on the network lab: python -m benchmarks.cyclic_zero.run

Bytes sent, memory per worker and step time at 2 and 4 workers and several link speeds; a fresh job for every cell, so
that no mode inherits another's memory. Prints a Markdown table and keeps the record under results/.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import armillary
from benchmarks.cyclic_zero.job import LAYERS, batch_of, loss_of, momentum, waiting_model
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SLACK = {"fsdp2": None, "zero_ring, slack 0": 0, "zero_ring, slack 1": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--mbit", default="1000,500,250")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--waiting-seconds", type=float, default=0.4, help="of a step: forward and backward of all layers"
    )
    parser.add_argument("--name", default="latest")
    options = parser.parse_args()
    begun, cells = time.monotonic(), []
    for workers in map(int, options.workers.split(",")):
        with Lab(workers, 0) as lab:
            for mbit in map(float, options.mbit.split(",")):
                lab.shape(mbit)
                for name, slack in SLACK.items():
                    cell = _cell(lab, mbit, slack, options.steps, options.waiting_seconds)
                    cells.append({"mode": name, "workers": workers, "mbit": mbit, **cell})
                    print(cells[-1]["mode"], workers, mbit, f"{time.monotonic() - begun:.0f} s so far", flush=True)
    record = {"waiting_seconds": options.waiting_seconds, "steps": options.steps, "cells": cells}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{options.name}.json").write_text(json.dumps(record) + "\n")
    print(table(record))


def planned(workers: int, mbit: float, slack: int, waiting_seconds: float) -> armillary.Plan:
    """A layer a stage, as a layer is a unit of FSDP2."""
    link = armillary.Link(3e-4, mbit * 1e6 / 8)
    topology = armillary.Topology(workers, 1, link, link, 8 << 30)
    model, batches = waiting_model(waiting_seconds), [batch_of(rank) for rank in range(workers)]
    facts = armillary.profile(model, batches, loss_of, workers=workers)
    way = {"slack": slack, "stages": LAYERS, "points": [str(layer) for layer in range(1, LAYERS)]}
    held = armillary.assumptions_of(momentum(model))
    return armillary.plan(facts, topology, assumptions=held, schedule=armillary.Choice("zero_ring", way))


def _cell(lab: Lab, mbit: float, slack: int | None, steps: int, waiting_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cell.json"
        words = ["--steps", str(steps), "--out", str(out), "--waiting-seconds", str(waiting_seconds)]
        if slack is not None:
            planned(lab.hosts, mbit, slack, waiting_seconds).save(Path(folder) / "plan.json")
            words += ["--plan", str(Path(folder) / "plan.json")]
        lab.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.cyclic_zero.job", *words], timeout_seconds=200, pin=True
        )
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def table(record: dict[str, Any]) -> str:
    """Times of the slowest worker; bytes and memory of the mean and the worst."""
    cells = record["cells"]
    lines = [
        f"{cells[0]['machine']}, weights {cells[0]['weight_bytes'] / 1e6:.1f} MB, layers wait "
        f"{record['waiting_seconds']} s a step, {record['steps']} timed steps.\n",
        "| workers | Mbit/s | mode | ms a step | MB a worker sends: mean (worst) | MB of PSS added: mean (worst) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        sent = [rank["sent_bytes"] / 1e6 for rank in cell["ranks"]]
        peaks = [rank["peak_bytes"] / 1e6 for rank in cell["ranks"]]
        milliseconds = max(rank["step_seconds"] for rank in cell["ranks"]) * 1e3
        lines.append(
            f"| {cell['workers']} | {cell['mbit']:g} | {cell['mode']} | {milliseconds:.0f} "
            f"| {statistics.fmean(sent):.1f} ({max(sent):.1f}) | {statistics.fmean(peaks):.0f} ({max(peaks):.0f}) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
