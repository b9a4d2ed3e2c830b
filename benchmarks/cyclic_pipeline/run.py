"""Cyclic against flush pipelines, 2 stages on 2 processes: python -m benchmarks.cyclic_pipeline.run

Writes figures.md: a table for 2 and for 4 micro-batches a step over all rounds of all records under results/, to which
each run adds one: whoever stops after the run that pleases keeps those that did not. (`--rounds 0` measures nothing.)
Ends with 1 if the cyclic pipeline is not as much faster than the best flush pipeline as was wanted.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring.bars import Bar, missed
from benchmarks.measuring.bars import table as table_of_bars
from benchmarks.measuring.page import written
from benchmarks.measuring.ratios import Quartiles, over_best, over_each, over_fastest_of_rounds, quartiles

HERE = Path(__file__).parent
CYCLIC = "cyclic"  # the contender of the bars
WANTED = {2: 1.35, 4: 1.15}  # by micro-batches a step; without flush a step has M ticks each way instead of M + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="of every contender, for each number of micro-batches")
    parser.add_argument("--steps", type=int, default=5, help="timed, a block")
    options = parser.parse_args()
    for micro_batches in WANTED if options.rounds else ():
        kept = HERE / "results" / f"{micro_batches}_micro_batches"
        kept.mkdir(parents=True, exist_ok=True)
        out = kept / f"{datetime.now(UTC):%Y-%m-%dT%H%M}.json"
        arguments = {"micro-batches": micro_batches, "rounds": options.rounds, "steps": options.steps, "out": out}
        _run([word for name, value in arguments.items() for word in (f"--{name}", str(value))])
    print(written(HERE, page(HERE / "results")))
    return int(bool(missed(bars(HERE / "results"))))


def page(results: Path) -> list[str]:
    """A table for each number of micro-batches, and every bar, in Markdown."""
    lines = ["`python -m benchmarks.cyclic_pipeline.run`", ""]
    for micro_batches in WANTED:
        lines += [*table(_record(results, micro_batches)), ""]
    return [*lines, *table_of_bars(bars(results))]


def bars(results: Path) -> list[Bar]:
    found = []
    for micro_batches, wanted in WANTED.items():
        record = _record(results, micro_batches)
        best, over = over_best(over_each(seconds(record), CYCLIC, flushes(record)))
        says = f"{micro_batches} micro-batches: cyclic, times as fast as the best flush pipeline ({best})"
        least = f"{wanted} or more (ideal {(micro_batches + 1) / micro_batches})"
        found.append(Bar(says, least, [statistics.median(over)], lambda it, wanted=wanted: it >= wanted, 3))
    return found


def _record(results: Path, micro_batches: int) -> dict[str, Any]:
    paths = sorted(results.glob(f"{micro_batches}_micro_batches/*.json"))
    return pooled(json.loads(path.read_text()) for path in paths)


def pooled(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One record of the rounds of several, in their order; of conditions that differ, all that were.

    Raises:
        ValueError: no record, or records of different contenders.
    """
    kept = list(records)
    if not kept:
        raise ValueError("cyclic_pipeline: no record under results/; measure first, with --rounds 1 or more")
    first, *others = kept
    whole = {name: dict(first[name]) for name in ("conditions", "blocks", "largest_weight_difference")}
    for other in others:
        if other["blocks"].keys() != whole["blocks"].keys():
            raise ValueError(
                f"cyclic_pipeline: one record has {', '.join(other['blocks'])}, another {', '.join(whole['blocks'])}; "
                f"move those of older code elsewhere"
            )
        for name, said in other["conditions"].items():
            before = str(whole["conditions"].get(name))
            whole["conditions"][name] = said if name != "rounds" and str(said) == before else f"{before} + {said}"
        for name, blocks in other["blocks"].items():
            whole["blocks"][name] = whole["blocks"][name] + blocks
            differences = whole["largest_weight_difference"]
            differences[name] = max(differences[name], other["largest_weight_difference"][name])
    return whole


def seconds(record: dict[str, Any]) -> dict[str, list[float]]:
    """Of a steady step, by contender, one a round."""
    return {name: [block["step_seconds"] for block in blocks] for name, blocks in record["blocks"].items()}


def flushes(record: dict[str, Any]) -> list[str]:
    """The contenders that cyclic is compared with."""
    return [name for name in record["blocks"] if "flush" in name]


def speedups(record: dict[str, Any]) -> dict[str, Quartiles]:
    """By contender, against the fastest flush pipeline of each round."""
    steps = seconds(record)
    return {
        name: quartiles(over_fastest_of_rounds(over_each(steps, name, flushes(record)))) for name in record["blocks"]
    }


def table(record: dict[str, Any]) -> list[str]:
    samples = record["conditions"]["micro-batches"] * record["conditions"]["samples a micro-batch"]
    lines = [
        ", ".join(f"{name} {said}" for name, said in record["conditions"].items()) + ".", "",
        "| pipeline | ms a step: median (quartiles) | samples/s | cyclic, times as fast as this: median of rounds "
        "| times as fast as the fastest flush of each round: median (quartiles) "
        "| CPU, ms a step of the busier process | ms a step with filling and draining | weights from torch GPipe's |",
        "|" + " --- |" * 8,
    ]  # fmt: skip
    over = over_each(seconds(record), CYCLIC, list(record["blocks"]))
    for name, ratio in speedups(record).items():
        blocks = record["blocks"][name]
        steps = quartiles([block["step_seconds"] for block in blocks])
        busy, whole = (statistics.median(block[what] for block in blocks) for what in ("cpu_seconds", "whole_seconds"))
        lines.append(
            f"| {name} | {steps.median * 1e3:.0f} ({steps.first * 1e3:.0f}-{steps.third * 1e3:.0f}) "
            f"| {samples / steps.median:.0f} | {statistics.median(over[name]):.3f} "
            f"| {ratio.median:.3f} ({ratio.first:.3f}-{ratio.third:.3f}) "
            f"| {busy * 1e3:.0f} | {whole * 1e3:.0f} | {record['largest_weight_difference'][name]:.1e} |"
        )
    return lines


def _run(arguments: list[str]) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["-m", "benchmarks.cyclic_pipeline.job", *arguments]
    subprocess.run([*launch, *job], check=True, timeout=1200)


if __name__ == "__main__":
    raise SystemExit(main())
