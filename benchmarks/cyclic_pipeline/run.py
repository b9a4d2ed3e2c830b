"""Cyclic against flush pipelines, 2 stages on 2 processes: python -m benchmarks.cyclic_pipeline.run

Prints a Markdown table for 2 and for 4 micro-batches a step and keeps the records as JSON under results/. Ends with 1
if the cyclic pipeline is not as much faster than the fastest flush pipeline of the same round as was wanted.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.hybrid.summary import Quartiles, quartiles

HERE = Path(__file__).parent
WANTED = {2: 1.35, 4: 1.15}  # by micro-batches a step; without flush a step has M ticks each way instead of M + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    is_short = False
    for micro_batches, wanted in WANTED.items():
        out = HERE / "results" / f"{micro_batches}_micro_batches.json"
        arguments = {"micro-batches": micro_batches, "rounds": options.rounds, "steps": options.steps, "out": out}
        _run([word for name, value in arguments.items() for word in (f"--{name}", str(value))])
        record = json.loads(out.read_text())
        print(table(record))
        ratio = speedups(record)["cyclic"].median
        ideal = (micro_batches + 1) / micro_batches
        print(f"cyclic against the fastest flush: {ratio:.3f} times faster, wanted {wanted}, ideal {ideal}\n")
        is_short |= ratio < wanted
    return int(is_short)


def speedups(record: dict[str, Any]) -> dict[str, Quartiles]:
    """By contender: how often its steady step fits into that of the fastest flush pipeline of the same round."""
    steps = {name: [b["step_seconds"] for b in blocks] for name, blocks in record["blocks"].items()}
    fastest = [min(turn) for turn in zip(*(own for name, own in steps.items() if "flush" in name))]
    return {name: quartiles([best / mine for best, mine in zip(fastest, own)]) for name, own in steps.items()}


def table(record: dict[str, Any]) -> str:
    samples = record["conditions"]["micro-batches"] * record["conditions"]["samples a micro-batch"]
    lines = [
        ", ".join(f"{name} {said}" for name, said in record["conditions"].items()) + ".\n",
        "| pipeline | ms a step: median (quartiles) | samples/s | times as fast as fastest flush: median (quartiles) "
        "| CPU, ms a step of the busier process | ms a step with filling and draining | weights from torch GPipe's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, ratio in speedups(record).items():
        blocks = record["blocks"][name]
        steps = quartiles([block["step_seconds"] for block in blocks])
        busy, whole = (statistics.median(block[what] for block in blocks) for what in ("cpu_seconds", "whole_seconds"))
        lines.append(
            f"| {name} | {steps.median * 1e3:.0f} ({steps.first * 1e3:.0f}-{steps.third * 1e3:.0f}) "
            f"| {samples / steps.median:.0f} | {ratio.median:.3f} ({ratio.first:.3f}-{ratio.third:.3f}) "
            f"| {busy * 1e3:.0f} | {whole * 1e3:.0f} | {record['largest_weight_difference'][name]:.1e} |"
        )
    return "\n".join(lines) + "\n"


def _run(arguments: list[str]) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["-m", "benchmarks.cyclic_pipeline.job", *arguments]
    subprocess.run([*launch, *job], check=True, timeout=1200)


if __name__ == "__main__":
    raise SystemExit(main())
