"""Holds every exchange's byte formula to the kernel's counters: python -m benchmarks.transfer.run

On the network lab, with 2, 4 and 8 hosts of one rank, and with 2 hosts of 2 ranks for what crosses nodes. Exit code 1
if an exchange is off by more than 2 %, and by more than its messages' headers.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SHAPES = [(2, 1), (4, 1), (8, 1), (2, 2)]
BOUND = 0.02
HEADER_BYTES = 1000.0  # of the few messages that an exchange sends from one rank to another: TCP's and gloo's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? 2 hosts only, nothing is kept")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        kept = Path(folder) if options.small else HERE / "results"
        kept.mkdir(exist_ok=True)
        for hosts, ranks_per_host in [shape for shape in SHAPES if shape[0] == 2 or not options.small]:
            found += _counted(hosts, ranks_per_host, kept / f"{hosts}x{ranks_per_host}.json")
    print("| exchange | workers | nodes | predicted, MB | counted, MB | counted / predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found:
        ratio = row["counted_bytes"] / row["predicted_bytes"]
        numbers = f"{row['predicted_bytes'] / 1e6:.3f} | {row['counted_bytes'] / 1e6:.3f} | {ratio:.4f}"
        print(f"| {row['exchange']} | {row['workers']} | {row['nodes']} | {numbers} |")
    off = [f"{row['exchange']} on {row['workers']}" for row in found if is_off(row)]
    print(f"\noff by more than {BOUND:.0%} and {HEADER_BYTES / 1e3:g} kB a pair of ranks: {', '.join(off) or 'none'}")
    return int(bool(off))


def _counted(hosts: int, ranks_per_host: int, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transfer.job", "--out", str(out)]
    command += ["--ranks-per-host", str(ranks_per_host)]
    with Lab(hosts, 1000) as lab:
        lab.run(command, ranks_per_host=ranks_per_host, timeout_seconds=300)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def is_off(row: dict[str, Any]) -> bool:
    pairs = row["workers"] * (row["workers"] - 1)
    over = abs(row["counted_bytes"] - row["predicted_bytes"])
    return bool(over > max(BOUND * row["predicted_bytes"], HEADER_BYTES * pairs))


if __name__ == "__main__":
    raise SystemExit(main())
