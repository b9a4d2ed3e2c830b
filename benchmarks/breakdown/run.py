"""Where a step goes when ranks outnumber their processors: python -m benchmarks.breakdown.run

On the network lab; the language model of `benchmarks/peers` (lm8) under a plan that prefetches, with parts of the
exchange left out. Writes figures.md of what is kept under results/.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring.page import written
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SAID = {
    "alone": "training alone",
    "nothing": "ours, every request answered on the spot",
    "rounds": "+ rounds of look-ups",
    "messages": "+ all other messages, short",
    "everything": "+ their bytes: ours as it is",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    if not options.report:
        _measure(options)
    print(written(HERE, page(HERE / "results")))


def _measure(options: argparse.Namespace) -> None:
    out = HERE / "results" / f"{options.workers}x{options.mbit:g}.json"
    out.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.breakdown.job", "--out", str(out)]
    told = ["--mbit", str(options.mbit), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as folder, Lab(options.workers, options.mbit) as lab:
        lab.run([*command, *told, "--folder", folder], timeout_seconds=1800, pin=True)
    record = {"machine": machine(), "steps a turn": options.steps, **json.loads(out.read_text())}
    out.write_text(json.dumps(record, indent=1) + "\n")


def page(results: Path) -> list[str]:
    """A table for each record, in Markdown."""
    lines = ["`python -m benchmarks.breakdown.run`", ""]
    for path in sorted(results.glob("*.json")):
        record, (workers, mbit) = json.loads(path.read_text()), path.stem.split("x")
        rounds = len(record["turns"]) // len(SAID)
        steps = f" of {record['steps a turn']} steps" if "steps a turn" in record else ""
        told = f"{workers} workers, {mbit} Mbit/s; {rounds} rounds{steps}, modes by turns in random order"
        lines += [f"{machines([record.get('machine')])}; {told}", "", *table(record["turns"]), ""]
    return lines


def table(turns: Sequence[dict[str, float | str]]) -> list[str]:
    """Rows of Markdown: medians over the turns of a mode, the ratio to training alone by rounds with its quartiles."""
    modes = {mode: [turn for turn in turns if turn["mode"] == mode] for mode in SAID}
    alone = [float(turn["wall"]) for turn in modes["alone"]]
    rows = [
        "| mode | ms a step | of training alone: median (quartiles) | processor, ms a rank | softirq | idle |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mode, own in modes.items():
        low, median, high = statistics.quantiles([float(t["wall"]) / a for t, a in zip(own, alone, strict=True)], n=4)
        wall, processor, softirq, idle = (
            statistics.median(float(turn[field]) for turn in own) for field in ("wall", "processor", "softirq", "idle")
        )
        ratio = "" if mode == "alone" else f"{median:.2f} ({low:.2f}-{high:.2f})"
        rows.append(f"| {SAID[mode]} | {wall:.1f} | {ratio} | {processor:.1f} | {softirq:.1f} | {idle:.1f} |")
    return rows


if __name__ == "__main__":
    main()
