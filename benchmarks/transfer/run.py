"""Holds every exchange's byte formula to the kernel's counters: python -m benchmarks.transfer.run

On the network lab, with 2, 4 and 8 hosts of one rank, and with 2 hosts of 2 ranks for what crosses nodes. Exit code 1
if an exchange is off by more than 2 %. The headers of messages are counted on a message that carries nearly nothing.
Writes README.md's table.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.record import machine
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SHAPES = [(2, 1), (4, 1), (8, 1), (2, 2)]
BOUND = 0.02
PAGE, MARK = HERE / "README.md", "<!-- written by run.py -->"


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
    off = [f"{row['exchange']} on {row['workers']}" for row in found if is_off(row)]
    text = f"{table(found)}\n\nOff by more than {BOUND:.0%}: {', '.join(off) or 'none'}. {machine()}."
    print(text)
    if not options.small:
        PAGE.write_text(f"{PAGE.read_text().split(MARK)[0]}{MARK}\n\n{text}\n")
    return int(bool(off))


def _counted(hosts: int, ranks_per_host: int, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transfer.job", "--out", str(out)]
    command += ["--ranks-per-host", str(ranks_per_host)]
    with Lab(hosts, 1000) as lab:
        lab.run(command, ranks_per_host=ranks_per_host, timeout_seconds=300)
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| exchange | workers | nodes | predicted, MB | headers, MB | counted, MB | counted / both |",
        "| --- " * 7 + "|",
    ]
    for row in found:
        numbers = " | ".join(f"{row[name] / 1e6:.3f}" for name in ("predicted_bytes", "header_bytes", "counted_bytes"))
        ratio = row["counted_bytes"] / _expected(row)
        lines.append(f"| {row['exchange']} | {row['workers']} | {row['nodes']} | {numbers} | {ratio:.4f} |")
    return "\n".join(lines)


def is_off(row: Mapping[str, Any]) -> bool:
    return abs(row["counted_bytes"] - _expected(row)) > BOUND * float(row["predicted_bytes"])


def _expected(row: Mapping[str, Any]) -> float:
    return float(row["predicted_bytes"] + row["header_bytes"])


if __name__ == "__main__":
    raise SystemExit(main())
