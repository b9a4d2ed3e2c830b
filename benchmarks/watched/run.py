"""The two watched steps of the one line beside DDP `sparse=True`: python -m benchmarks.watched.run   (root, iproute2)

Writes figures.md from what was kept; --report writes it and measures nothing. Exit code 1 if a watched step takes more
than twice a step of DDP.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import bars
from benchmarks.measuring.record import machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
CELLS = [(ranks, mbit) for ranks in (2, 4) for mbit in (100.0, 1000.0)]
RIVAL, JUDGED = "DDP sparse", "watched, sparse=True"
BAR = 2.0

Round = Mapping[str, float]  # seconds of a step by contender


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model on 2 ranks, nothing is kept")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "watched.json")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    cells = [(2, 1000.0)] if options.small else CELLS
    rounds = 1 if options.small else options.rounds
    if options.report:
        found = json.loads(options.out.read_text())
    else:
        found = {_cell(*cell): _measured(*cell, rounds, options.small) for cell in cells}
    text = page(found)
    print(text)
    if options.small:
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    (options.out.parent.parent / "figures.md").write_text(text + "\n")
    return int(any(over(one["rounds"]) > BAR for one in found.values()))


def _cell(ranks: int, mbit_per_second: float) -> str:
    return f"{ranks} ranks, {mbit_per_second:g} Mbit/s"


def _measured(ranks: int, mbit_per_second: float, rounds: int, is_small: bool) -> dict[str, Any]:
    with TemporaryDirectory() as folder, Lab(ranks, mbit_per_second) as lab:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.watched.job", "--rounds", str(rounds)]
        lab.run([*command, "--out", str(out), *["--small"] * is_small], timeout_seconds=1200, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def over(rounds: Sequence[Round], contender: str = JUDGED) -> float:
    """A step over the rival's of the same round, the median of rounds."""
    return statistics.median(one[contender] / one[RIVAL] for one in rounds)


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """found: by cell."""
    rounds = {cell: one["rounds"] for cell, one in found.items()}
    judged = [
        bars.Bar(
            f"{cell}: a step of {JUDGED}, times one of {RIVAL}", f"{BAR:g} or less",
            [over(rounds[cell])] if cell in rounds else [], lambda it: it <= BAR,
        )
        for cell in (_cell(*cell) for cell in CELLS)
    ]  # fmt: skip
    head = f"{len(next(iter(rounds.values())))} rounds; {machines(one['machine'] for one in found.values())}"
    return "\n".join([head, "", table(rounds), "", *bars.table(judged)])


def table(found: Mapping[str, Sequence[Round]]) -> str:
    """found: by cell."""
    header = ("cell", "contender", "ms a step: median (lowest-highest)", f"over {RIVAL} (lowest-highest)")
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for cell, rounds in found.items():
        for name in rounds[0]:
            times = [1e3 * one[name] for one in rounds]
            ratios = [one[name] / one[RIVAL] for one in rounds]
            spread = f"{over(rounds, name):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            seconds = f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"
            lines.append(f"| {cell} | {name} | {seconds} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
