"""All-to-all and all-reduce of gloo beside those of `armillary.runtime.pairwise`: python -m benchmarks.turns.run

On the network lab, 4 and 8 workers, 100 Mbit/s and 1 Gbit/s; prints a Markdown table.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.measuring.record import machine
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{machine()}; medians (quartiles) of {options.rounds} turns each, seconds from barrier to barrier\n")
    print("| workers | Mbit/s | request | kB a rank | gloo, ms | ours, ms | link alone, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for workers in (4, 8):
        for mbit in (100, 1000):
            out = HERE / "results" / f"{workers}x{mbit}.json"
            out.parent.mkdir(exist_ok=True)
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.turns.job", "--out", str(out)]
            with Lab(workers, mbit) as lab:
                lab.run([*command, "--rounds", str(options.rounds)], timeout_seconds=600, pin=True)
            for row in json.loads(out.read_text())["rows"]:
                crossing = row["bytes"] * (workers - 1) / workers * (2 if row["request"] == "all-reduce" else 1)
                alone = crossing * 8 / mbit / 1e3
                shown = " | ".join(_quartiles(row["seconds"][way]) for way in ("gloo", "turns"))
                print(f"| {workers} | {mbit} | {row['request']} | {row['bytes'] / 1e3:.0f} | {shown} | {alone:.1f} |")


def _quartiles(seconds: list[float]) -> str:
    low, median, high = (1e3 * one for one in seconds)
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


if __name__ == "__main__":
    main()
