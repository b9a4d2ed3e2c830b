"""The cost of our own Python at 8 workers: python -m benchmarks.overhead.run

Prints a Markdown table and keeps the record, with profiles, under results/. Ends with 1 if a step of ours
costs its thread 5 ms more than the same step without exchange.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WANTED_MILLISECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    out = HERE / "results" / f"{options.workers}_workers.json"
    out.parent.mkdir(exist_ok=True)
    launch = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={options.workers}", "-m", "benchmarks.overhead.job",
    ]  # fmt: skip
    rest = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--out", str(out)]
    subprocess.run([*launch, *rest], check=True, timeout=900)
    record = json.loads(out.read_text())
    print(table(record))
    return int(any(more > WANTED_MILLISECONDS for name, more in overheads(record).items() if name.startswith("ours")))


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


def table(record: dict[str, Any]) -> str:
    ranks = record["thread_milliseconds_a_step_by_rank"]
    lines = [
        ", ".join(f"{name} {said}" for name, said in record["conditions"].items()) + ".\n",
        "| mode | thread ms a step: median over ranks and rounds | more than alone, worst rank |",
        "| --- | --- | --- |",
    ]
    for name, more in overheads(record).items():
        whole = statistics.median(value for rank in ranks for value in rank[name])
        lines.append(f"| {name} | {whole:.2f} | {more:.2f} |")
    for name, rows in record["profiles"].items():
        lines += ["", f"{name}: {rows[0]}", *(f"    {row}" for row in rows[1:11])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
