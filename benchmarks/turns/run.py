"""All-to-all and all-reduce of gloo beside those of `armillary.transport.pairwise`: python -m benchmarks.turns.run

On the network lab, 4 and 8 workers, 100 Mbit/s and 1 Gbit/s. Writes figures.md of what is kept under results/.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.measuring.page import written
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
LABS = [(workers, mbit) for workers in (4, 8) for mbit in (100, 1000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    for workers, mbit in () if options.report else LABS:
        out = HERE / "results" / f"{workers}x{mbit}.json"
        out.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.turns.job", "--out", str(out)]
        with Lab(workers, mbit) as lab:
            lab.run([*command, "--rounds", str(options.rounds)], timeout_seconds=600, pin=True)
        record = {"machine": machine(), "rounds": options.rounds, **json.loads(out.read_text())}
        out.write_text(json.dumps(record, indent=1) + "\n")
    print(written(HERE, page(HERE / "results")))


def page(results: Path) -> list[str]:
    """The table, in Markdown."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    made_on = machines(record.get("machine") for record in records.values())
    rounds = sorted({record["rounds"] for record in records.values() if "rounds" in record})
    each = "".join(f" of {number} turns" for number in rounds)
    lines = [
        "`python -m benchmarks.turns.run`", "",
        f"{made_on}; medians (quartiles){each}, from barrier to barrier", "",
        "| workers | Mbit/s | request | kB a rank | gloo, ms | ours, ms | link alone, ms |", "|" + " --- |" * 7,
    ]  # fmt: skip
    for name, record in records.items():
        workers, mbit = map(int, name.split("x"))
        for row in record["rows"]:
            crossing = row["bytes"] * (workers - 1) / workers * (2 if row["request"] == "all-reduce" else 1)
            alone = crossing * 8 / mbit / 1e3
            shown = " | ".join(_quartiles(row["seconds"][way]) for way in ("gloo", "turns"))
            asked = f"{row['request']} | {row['bytes'] / 1e3:.0f}"
            lines.append(f"| {workers} | {mbit} | {asked} | {shown} | {alone:.1f} |")
    return lines


def _quartiles(seconds: list[float]) -> str:
    low, median, high = (1e3 * one for one in seconds)
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


if __name__ == "__main__":
    main()
