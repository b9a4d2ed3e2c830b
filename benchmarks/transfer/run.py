"""Holds every exchange's byte formula to the kernel's counters: python -m benchmarks.transfer.run

On the network lab, with 2, 4 and 8 hosts of one rank, and with 2 hosts of 2 ranks for what crosses nodes. Exit code 1
if an exchange is off by more than 2 %. The headers of messages are counted on a message that carries nearly nothing.
Writes figures.md from what was kept; --report writes it and measures nothing.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import bars
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
SHAPES = [(2, 1), (4, 1), (8, 1), (2, 2)]
BOUND = 0.02
MACHINE = "machine.txt"  # beside the records, which do not name it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? 2 hosts only, nothing is kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        kept = Path(folder) if options.small else HERE / "results"
        kept.mkdir(exist_ok=True)
        if not options.report:
            (kept / MACHINE).write_text(machine() + "\n")
            for shape in (shape for shape in SHAPES if shape[0] == 2 or not options.small):
                _count(*shape, kept / _name(shape))
        found, text = _rows(kept), page(kept)
    print(text)
    if not options.small:
        (HERE / "figures.md").write_text(text + "\n")
    return int(any(map(is_off, found)))


def _count(hosts: int, ranks_per_host: int, out: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transfer.job", "--out", str(out)]
    command += ["--ranks-per-host", str(ranks_per_host)]
    with Lab(hosts, 1000) as lab:
        lab.run(command, ranks_per_host=ranks_per_host, timeout_seconds=300)


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}.json"


def _rows(kept: Path) -> list[dict[str, Any]]:
    """Of all shapes that were counted."""
    paths = [path for shape in SHAPES if (path := kept / _name(shape)).exists()]
    return [row for path in paths for row in json.loads(path.read_text())]


def page(kept: Path) -> str:
    """The machine, the table and the bar, from records."""
    found = _rows(kept)
    told = (kept / MACHINE).read_text().strip() if (kept / MACHINE).exists() else None
    off = [f"{row['exchange']} on {row['workers']}" for row in found if is_off(row)]
    says = f"exchanges, of {len(found)}, whose count is off by more than {BOUND:.0%} of the prediction"
    bar = bars.Bar(says, "0", [len(off)] if found else [], lambda it: it == 0)
    head, named = f"Links of 1 Gbit/s; {machines([told])}", f"Off: {', '.join(off) or 'none'}."
    return "\n".join([head, "", table(found), "", named, "", *bars.table([bar])])


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
