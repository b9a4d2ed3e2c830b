"""Parallax's tables in small, on the network lab: python -m benchmarks.parallax.run sweep|ablation|scaling

A job that is in results/ is not run again (`--again` does). Prints Markdown and writes figures.md; `sweep` ends with 1
if at some point the plan is slower than the better of all-reduce and owners for everything.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.bars import missed
from benchmarks.measuring.record import load
from benchmarks.netlab.lab import Lab
from benchmarks.parallax import page
from benchmarks.parallax.tables import LENGTHS, ablation, bars, scaling, sweep

HERE = Path(__file__).parent
MODEL_NAMES = ("language_model", "translation")
WORKERS = (1, 2, 4, 8)
LONG = ("--steps", "12")  # a turn ends with the slowest of ranks that share cores: of three steps a third was that


@dataclass(frozen=True)
class Job:
    """One launch. hosts of ranks_per_host; options: of `job.py`, beside links and results."""

    name: str
    hosts: int
    ranks_per_host: int
    mbit: float
    options: tuple[str, ...]


def jobs(table: str) -> tuple[Job, ...]:
    if table == "sweep":
        modes = ("--modes", "all_reduce,owned,planned,planned_again")
        return tuple(Job(f"sweep_{length}", 4, 1, 1000.0, ("--length", str(length), *modes)) for length in LENGTHS)
    if table == "ablation":
        modes = ("--modes", "all_reduce,owned_dense,owned_dense_local,hybrid,planned", "--rounds", "3", *LONG)
        return tuple(Job(f"ablation_{name}", 4, 2, 1000.0, ("--workload", name, *modes)) for name in MODEL_NAMES)
    modes = ("--modes", "all_reduce,hybrid,planned", "--rounds", "4", *LONG)
    return tuple(
        Job(f"scaling_{name}_{count}", count, 1, 1000.0, ("--workload", name, *modes))
        for count in WORKERS
        for name in MODEL_NAMES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("sweep", "ablation", "scaling"))
    parser.add_argument("--again", action="store_true", help="run jobs that are there already")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    wanted = jobs(options.table)
    for number, job in enumerate(wanted, 1):
        path = options.results / f"{job.name}.json"
        if options.report or (path.exists() and not options.again):
            continue
        began = time.perf_counter()
        _run(job, path)
        print(f"{number}/{len(wanted)} {job.name}: {time.perf_counter() - began:.0f} s", flush=True)
    paths = [path for job in wanted if (path := options.results / f"{job.name}.json").exists()]
    records = {path.stem: load(path) for path in paths}
    print({"sweep": sweep, "ablation": ablation, "scaling": scaling}[options.table](records))
    page.write(options.results)
    late = missed(bars(records)) if options.table == "sweep" else []
    print("\n".join(f"missed: {bar.says}: {bar.figures[0]:.3f}" for bar in late))
    return int(bool(late))


def _run(job: Job, path: Path) -> None:
    command: Sequence[str] = [sys.executable, "-W", "ignore", "-m", "benchmarks.parallax.job", *job.options]
    with Lab(job.hosts, job.mbit) as lab:
        lab.run(
            [*command, "--mbit", str(job.mbit), "--out", str(path)],
            ranks_per_host=job.ranks_per_host,
            timeout_seconds=300,
            pin=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
