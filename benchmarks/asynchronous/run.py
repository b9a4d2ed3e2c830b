"""Updates without a common clock beside those of all ranks together: python -m benchmarks.asynchronous.run [--small]

Four ranks train the recommender on as many batches each way: ranks that are equally fast, one that is three times
slower, and one step in four threefold by lot. Each cell is made once and kept under results/. Exit code 1 if a bar is
missed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.asynchronous.job import WAYS
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, Found, command
from benchmarks.measuring.record import machines

HERE = Path(__file__).parent
RANKS, BATCHES, ROUNDS = 4, 800, 2
DELAYS = {"equal": "equally fast", "slow": "one three times slower", "lot": "one step in four threefold, by lot"}
CLOCKED = ("all_reduce", "owned rows")
GAIN, NONE = 1.3, 1.1


def make(cells: Cells, is_small: bool, only: str | None) -> None:
    """Round by round, so that a slow minute falls on every way."""
    small = [("lot", "owned rows"), ("lot", "bound=4")]
    for number in range(1 if is_small else ROUNDS):
        for delays, way in small if is_small else [(delays, way) for delays in DELAYS for way in WAYS]:
            cells.once(f"{delays}/{way}; {number}", lambda: timed(delays, way, is_small))  # noqa: B023


def timed(delays: str, way: str, is_small: bool) -> Mapping[str, Any]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += ["2" if is_small else str(RANKS), "-m", "benchmarks.asynchronous.job", "--way", way]
        command += ["--delays", delays, "--batches", "24" if is_small else str(BATCHES), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *["--small"] * is_small], check=True, timeout=300, env=environment)
        found: Mapping[str, Any] = json.loads(out.read_text())
        return found


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """Tables of the cells that are made, and the bars."""
    if not found:
        return ["nothing is measured yet"], []
    lines = [machines(one["machine"] for one in found.values()), "", "Each round of a cell, in order."]
    for delays, said in DELAYS.items():
        lines += ["", f"## Ranks: {said}", ""]
        lines += ["| way | samples a second | foreseen | held-out error | steps by rank |", "|" + " --- |" * 5]
        for way in WAYS:
            if those := cells_of(found, delays, way):
                rates = ", ".join(f"{one['samples_a_second']:,.0f}" for one in those)
                errors = ", ".join(f"{one['error']:.3f}" for one in those)
                steps = ", ".join(map(str, those[-1]["steps"]))
                lines.append(f"| {way} | {rates} | {those[-1]['foreseen']:,.0f} | {errors} | {steps} |")
        notes = {note for one in cells_of(found, delays, "bound=None") for note in one["notes"][:1]}
        lines += ["", *(f"The plan of `bound=None` says: {note}." for note in sorted(notes)[:1])]
    bars = bars_of(found)
    return [*lines, "", "## Bars", "", *table(bars)], bars


def cells_of(found: Found, delays: str, way: str) -> list[Mapping[str, Any]]:
    return [one for name, one in sorted(found.items()) if name.startswith(f"{delays}/{way};")]


def gain(found: Found, delays: str, way: str) -> list[float]:
    """Samples a second, of those of the faster way that has a clock; the best round of each."""
    best = [max((one["samples_a_second"] for one in cells_of(found, delays, other)), default=0.0) for other in CLOCKED]
    mine = max((one["samples_a_second"] for one in cells_of(found, delays, way)), default=0.0)
    return [mine / max(best)] if mine and min(best) else []


def bars_of(found: Found) -> list[Bar]:
    says = [note for one in cells_of(found, "equal", "bound=4") for note in one["notes"] if "only lose" in note]
    is_said = [float(bool(says))] if cells_of(found, "equal", "bound=4") else []
    return [
        Bar(
            "one rank slower: gain of bound=None",
            "1.3 or more",
            gain(found, "slow", "bound=None"),
            lambda it: it >= GAIN,
        ),
        Bar(
            "one rank slower: bound=4 gains nothing",
            "1.1 or less",
            gain(found, "slow", "bound=4"),
            lambda it: it <= NONE,
        ),
        Bar("slow by lot: gain of bound=4", "1.3 or more", gain(found, "lot", "bound=4"), lambda it: it >= GAIN),
        Bar("equal ranks: bound=4 loses", "1 or less", gain(found, "equal", "bound=4"), lambda it: it <= 1),
        Bar("equal ranks: the plan says that it can only lose", "1", is_said, lambda it: it == 1),
    ]


if __name__ == "__main__":
    sys.exit(command(__doc__, Benchmark(HERE, {"ranks": RANKS, "batches": BATCHES}, make, page)))
