"""Simulated beside measured, for five schedules on two hosts: python -m benchmarks.played.run   (root, iproute2)

Writes figures.md from what was kept; --report writes it and measures nothing. Exit code 1 if a schedule's seconds are
off by more than 15 %, or it cannot be played.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import bars
from benchmarks.measuring.record import machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SPEEDS = (100.0, 1000.0)  # Mbit/s
SIZES = {"data": "patterns", "architecture": "vit", "width": 96, "depth": 6, "batch_size": 8}
SMALL = {"data": "patterns", "architecture": "vit", "width": 16, "depth": 2, "batch_size": 4}
WITHIN = 0.15

Rows = dict[str, dict[str, Any]]  # by schedule


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model, nothing is kept")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "played.json")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    speeds = SPEEDS[-1:] if options.small else SPEEDS
    if options.report:
        found = json.loads(options.out.read_text())
    else:
        found = {_link(speed): _measured(speed, options.small) for speed in speeds}
    text = page(found)
    print(text)
    if options.small:
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    (options.out.parent.parent / "figures.md").write_text(text + "\n")
    return int(any(off(row) > WITHIN for one in found.values() for row in one["rows"].values()))


def _link(mbit_per_second: float) -> str:
    return f"{mbit_per_second:g} Mbit/s"


def _measured(mbit_per_second: float, is_small: bool) -> dict[str, Any]:
    steps, rounds = ("2", "1") if is_small else ("10", "3")
    sizes = SMALL if is_small else SIZES
    with TemporaryDirectory() as folder, Lab(2, mbit_per_second) as lab:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.played.job", "--sizes", json.dumps(sizes)]
        lab.run([*command, "--steps", steps, "--rounds", rounds, "--out", str(out)], timeout_seconds=600, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def off(row: Mapping[str, Any]) -> float:
    """By what share of the measured seconds the simulated ones are off; infinite where they are missing."""
    return math.inf if row["played"] is None else abs(row["played"] / row["measured"] - 1)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """found: by link."""
    rows = {link: one["rows"] for link, one in found.items()}
    judged = [
        bars.Bar(
            f"{link}: the schedule whose simulated step is furthest off the measured one, per cent",
            f"{100 * WITHIN:g} or less", [100 * max(map(off, rows[link].values()))] if link in rows else [],
            lambda it: it <= 100 * WITHIN,
        )
        for link in map(_link, SPEEDS)
    ]  # fmt: skip
    head = f"2 hosts of one rank; {machines(one['machine'] for one in found.values())}"
    return "\n".join([head, "", table(rows), "", *bars.table(judged)])


def table(found: dict[str, Rows]) -> str:
    """found: by link."""
    lines = ["| link | schedule | simulated ms | measured ms (blocks) | simulated / measured |", "| --- " * 5 + "|"]
    for link, rows in found.items():
        for name, row in rows.items():
            blocks = "-".join(f"{1e3 * one:.0f}" for one in (min(row["blocks"]), max(row["blocks"])))
            played = "not played" if row["played"] is None else f"{1e3 * row['played']:.1f}"
            ratio = "" if row["played"] is None else f"{row['played'] / row['measured']:.2f}"
            lines.append(f"| {link} | {name} | {played} | {1e3 * row['measured']:.1f} ({blocks}) | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
