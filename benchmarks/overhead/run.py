"""The cost of our own Python at 8 workers: python -m benchmarks.overhead.run

Keeps the record, with profiles, under results/ and writes figures.md of what is kept there. Ends with 1 if a step of
ours costs its thread 5 ms more than the same step without exchange.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring.bars import Bar, missed
from benchmarks.measuring.bars import table as table_of_bars
from benchmarks.measuring.page import written

HERE = Path(__file__).parent
WANTED_MILLISECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    out = HERE / "results" / f"{options.workers}_workers.json"
    if not options.report:
        _measure(options, out)
    print(written(HERE, page(HERE / "results")))
    record = json.loads(out.read_text())
    for name, rows in record["profiles"].items():
        print(f"{name}: {rows[0]}", *rows[1:11], "", sep="\n    ")
    return int(bool(missed(bars(record))))


def _measure(options: argparse.Namespace, out: Path) -> None:
    out.parent.mkdir(exist_ok=True)
    launch = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={options.workers}", "-m", "benchmarks.overhead.job",
    ]  # fmt: skip
    rest = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--out", str(out)]
    subprocess.run([*launch, *rest], check=True, timeout=900)


def page(results: Path) -> list[str]:
    """A table for each record, and every bar, in Markdown."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob("*_workers.json"))]
    lines = ["`python -m benchmarks.overhead.run`", ""]
    for record in records:
        lines += [*table(record), ""]
    return [*lines, *table_of_bars([bar for record in records for bar in bars(record)])]


def bars(record: dict[str, Any]) -> list[Bar]:
    workers = record["conditions"]["workers"]
    return [
        Bar(f"{workers} workers: {name}, thread ms a step more than alone, worst rank",
            f"{WANTED_MILLISECONDS:g} or less", [more], lambda it: it <= WANTED_MILLISECONDS)
        for name, more in overheads(record).items() if name.startswith("ours")
    ]  # fmt: skip


def overheads(record: dict[str, Any]) -> dict[str, float]:
    """By mode, on the worst rank: milliseconds a step more than alone, the median over rounds."""
    ranks = record["thread_milliseconds_a_step_by_rank"]
    return {
        name: max(
            statistics.median(mine - base for mine, base in zip(rank[name], rank["alone"], strict=True))
            for rank in ranks
        )
        for name in ranks[0]
    }


def table(record: dict[str, Any]) -> list[str]:
    ranks = record["thread_milliseconds_a_step_by_rank"]
    lines = [
        ", ".join(f"{name} {said}" for name, said in record["conditions"].items()) + ".", "",
        "| mode | thread ms a step: median over ranks and rounds | more than alone, worst rank | profile, ms |",
        "|" + " --- |" * 4,
    ]  # fmt: skip
    for name, more in overheads(record).items():
        whole = statistics.median(value for rank in ranks for value in rank[name])
        profile = record["profiles"].get(name, ["-"])[0].split(" ")[0]
        lines.append(f"| {name} | {whole:.2f} | {more:.2f} | {profile} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
