"""`zero_ring` against FSDP2, one unit a stage, on the network lab: python -m benchmarks.cyclic_zero.run

Bytes sent, memory per worker and step time at 2 and 4 workers and several link speeds; a fresh job for every cell, so
that no mode inherits another's memory. Keeps the record under results/ and writes figures.md of what is kept there.
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
from benchmarks.measuring.page import written
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
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    if not options.report:
        _measure(options)
    print(written(HERE, page(HERE / "results")))


def _measure(options: argparse.Namespace) -> None:
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


def page(results: Path) -> list[str]:
    """A table for each record, in Markdown."""
    lines = ["`python -m benchmarks.cyclic_zero.run`", ""]
    for path in sorted(results.glob("*.json")):
        lines += [*table(json.loads(path.read_text())), ""]
    return lines


def table(record: dict[str, Any]) -> list[str]:
    """Times of the slowest worker; bytes and memory of the mean and the worst; ratios to FSDP2 of the same links."""
    cells = record["cells"]
    lines = [
        f"{cells[0]['machine']}, weights {cells[0]['weight_bytes'] / 1e6:.1f} MB, layers wait "
        f"{record['waiting_seconds']} s a step, {record['steps']} timed steps.", "",
        "| workers | Mbit/s | mode | ms a step | times as fast as fsdp2 | MB a worker sends: mean (worst) "
        "| MB of PSS added: mean (worst) | of fsdp2's, mean |", "|" + " --- |" * 8,
    ]  # fmt: skip
    rivals = {(cell["workers"], cell["mbit"]): _told(cell) for cell in cells if cell["mode"] == "fsdp2"}
    for cell in cells:
        mine, rival = _told(cell), rivals[cell["workers"], cell["mbit"]]
        lines.append(
            f"| {cell['workers']} | {cell['mbit']:g} | {cell['mode']} | {mine['ms']:.0f} "
            f"| {rival['ms'] / mine['ms']:.2f} | {mine['sent']:.1f} ({mine['most sent']:.1f}) "
            f"| {mine['added']:.0f} ({mine['most added']:.0f}) | {mine['added'] / rival['added']:.2f} |"
        )
    return lines


def _told(cell: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of the slowest worker, MB of the mean one and of the worst one."""
    sent, added = ([rank[key] / 1e6 for rank in cell["ranks"]] for key in ("sent_bytes", "peak_bytes"))
    return {
        "ms": 1e3 * max(rank["step_seconds"] for rank in cell["ranks"]),
        "sent": statistics.fmean(sent), "most sent": max(sent),
        "added": statistics.fmean(added), "most added": max(added),
    }  # fmt: skip


if __name__ == "__main__":
    main()
