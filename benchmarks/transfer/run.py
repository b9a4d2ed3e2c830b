"""Holds every exchange's byte formula to the kernel's counters: python -m benchmarks.transfer.run

On the network lab, with 2, 4 and 8 hosts of one rank, and with 2 hosts of 2 ranks for what crosses nodes.
"""

import json
import sys
from pathlib import Path

from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SHAPES = [(2, 1), (4, 1), (8, 1), (2, 2)]
BOUND = 0.02


def main() -> int:
    found = []
    for hosts, ranks_per_host in SHAPES:
        out = HERE / "results" / f"{hosts}x{ranks_per_host}.json"
        out.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transfer.job", "--out", str(out)]
        with Lab(hosts, 1000) as lab:
            lab.run(
                [*command, "--ranks-per-host", str(ranks_per_host)], ranks_per_host=ranks_per_host, timeout_seconds=300
            )
        found += json.loads(out.read_text())
    print("| exchange | workers | nodes | predicted, MB | counted, MB | counted / predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found:
        ratio = row["counted_bytes"] / row["predicted_bytes"]
        numbers = f"{row['predicted_bytes'] / 1e6:.3f} | {row['counted_bytes'] / 1e6:.3f} | {ratio:.4f}"
        print(f"| {row['exchange']} | {row['workers']} | {row['nodes']} | {numbers} |")
    worst = max(abs(row["counted_bytes"] / row["predicted_bytes"] - 1) for row in found)
    print(f"\nworst deviation {worst:.2%}, bound {BOUND:.0%}")
    return int(worst > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
