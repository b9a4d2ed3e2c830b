"""Compares modes on the network lab.

Run as: python -m benchmarks.hybrid.run --workers 8 --mbit 100 --modes owned_rows,ddp_sparse,compute_only

Prints a Markdown table, ratios taken to the mode --against, and keeps the record as JSON under results/.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.hybrid.record import load
from benchmarks.hybrid.summary import table
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--against", default="compute_only")
    parser.add_argument("--name", default="")
    options, rest = parser.parse_known_args()
    out = HERE / "results" / f"{options.name or f'{options.workers}x{options.mbit:g}'}.json"
    out.parent.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.hybrid.job",
        "--mbit",
        str(options.mbit),
        "--out",
        str(out),
    ]
    with Lab(options.workers, options.mbit) as lab:
        lab.run([*command, *rest], timeout_seconds=1500, pin=True, watch=lambda text: print(text, end="", flush=True))
    print(table(load(out), options.against))


if __name__ == "__main__":
    main()
