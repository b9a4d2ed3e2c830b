"""Seconds a step of every mesh, over slow links: python -m benchmarks.mesh.run

Needs root and iproute2. A cell is made once and kept under results/. Exit code 1 if a bar is missed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.bars import Bar, missed, table
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machines
from benchmarks.mesh.long import TOKENS
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.namespaces import LabUnavailable

HERE = Path(__file__).parent
HOSTS, MBITS = (8, 4), (100, 1000)
NEAR = 1.10
LIMITS = {"fits": float("inf"), "a quarter": 1 / 4, "a half": 1 / 2}  # of what DDP holds
FEW = ("--few", "--steps", "1")  # where a step takes seconds
Found = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model, nothing is kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--cells", type=int, default=0, help="stop behind so many new cells; 0: all")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        kept = Path(folder) if options.small else HERE / "results"
        cells = Cells(kept, {"small": options.small}, options.cells)
        try:
            if not options.report:
                _make(cells, options.small)
        except Enough:
            pass
        except LabUnavailable as error:
            print(f"mesh: SKIPPED, nothing more measured: {error}")
        found = {path.stem: json.loads(path.read_text()) for path in kept.glob("*.json") if path.stem != "settings"}
        lines, bars = page(found)
        print("\n".join(lines) if options.small else written(HERE, lines))
    return int(bool(missed(bars)))


def _make(cells: Cells, is_small: bool) -> None:
    if is_small:
        cells.once("long, 4 hosts, 1000", lambda: _cell("long", 4, 1000, ["--small", "--rounds", "1", "--steps", "1"]))
        cells.once("activations", lambda: _ran(4, 0, ["benchmarks.mesh.long", "256"]))
        return
    for case, hosts, mbit in _cells():
        more = FEW if case == "longer" else ()
        name = f"{case}, {hosts} hosts, {mbit}"
        cells.once(name, lambda c=case, h=hosts, m=mbit, o=more: _cell(c, h, m, o))
    cells.once("activations", lambda: _ran(4, 0, ["benchmarks.mesh.long"]))


def _cells() -> list[tuple[str, int, int]]:
    return [*((case, 4, mbit) for case in ("long", "wide") for mbit in MBITS), ("long", 8, 100), ("longer", 8, 100)]


def _cell(case: str, hosts: int, mbit: int, more: Sequence[str]) -> Found:
    return _ran(hosts, mbit, ["benchmarks.mesh.job", "--case", case, *more])


def _ran(hosts: int, mbit: int, words: Sequence[str]) -> Found:
    with Lab(hosts, mbit) as lab:
        ended = lab.run([sys.executable, "-W", "ignore", "-m", *words], timeout_seconds=600, pin=True)
    said = next(line for line in ended.outputs[0].splitlines() if line.startswith("RECORD "))
    found: Found = json.loads(said.removeprefix("RECORD "))
    return found


def _seconds(one: Found, name: str) -> float:
    return statistics.median(one["seconds"][name])


def page(found: Mapping[str, Found]) -> tuple[list[str], list[Bar]]:
    """A table a cell, and the bars."""
    timed = {name: one for name, one in found.items() if "seconds" in one}
    lines = [machines(one["machine"] for one in timed.values())]
    for name, one in sorted(timed.items()):
        lines += ["", f"## {name} Mbit/s", "", f"Taken: {_taken(one)}", ""]
        lines += ["| mesh | ms a step | range | forecast | MB held | forecast |", "|" + " --- |" * 6]
        for mode in sorted(one["seconds"], key=lambda mode: _seconds(one, mode)):
            rounds = one["seconds"][mode]
            spread = f"{1e3 * min(rounds):.0f} to {1e3 * max(rounds):.0f}"
            foreseen = f"{1e3 * one['forecast'][mode]:.0f}" if mode in one["forecast"] else "-"
            held = f"{one['forecast_held'][mode] / 1e6:.1f}" if mode in one["forecast_held"] else "-"
            lines.append(
                f"| {mode} | {1e3 * _seconds(one, mode):.0f} | {spread} | {foreseen} | {one['held'][mode] / 1e6:.1f} | "
                f"{held} |"
            )
    if (kept := found.get("activations")) is not None:
        lines += ["", f"## Activations of {TOKENS} tokens, at the most of a step", "", "| | MB |", "| --- | --- |"]
        lines += [f"| {name} | {found_bytes / 1e6:.1f} |" for name, found_bytes in kept.items()]
    bars = _bars(found, timed)
    return [*lines, "", "## Bars", "", *table(bars)], bars


def _taken(one: Found) -> str:
    return "; ".join(f"{mode} where memory is {budget}" for budget, mode in one["taken"].items()).replace(
        "memory is fits", "all fit"
    )


def _bars(found: Mapping[str, Found], timed: Mapping[str, Found]) -> list[Bar]:
    eight = timed.get("longer, 8 hosts, 100") or timed.get("long, 8 hosts, 100")
    four = timed.get("long, 4 hosts, 100")
    grid = [_faster(eight, "torch 1D (data 1, tensor 8)", "2.5d (depth 2, row 2, column 2)")] if eight else []
    pair = [_faster(four, "torch 1D (data 1, tensor 4)", "columns_rows (tensor 4)")] if four else []
    against, near = [], []
    for name, one in timed.items():
        if "4 hosts" not in name:
            continue
        for budget, mode in one["taken"].items():
            limit = one["held"]["torch DDP"] * LIMITS[budget]
            theirs = [other for other in one["seconds"] if other.startswith("torch") and one["held"][other] <= limit]
            mine = [other for other in one["seconds"] if one["held"][other] <= limit or other == mode]
            if theirs:
                against.append(_beside(one, mode, min(theirs, key=lambda other: _seconds(one, other))))
            near.append(_beside(one, mode, min(mine, key=lambda other: _seconds(one, other)), NEAR))
    kept = found.get("activations")
    share = [max(kept["heads"], kept["ring"]) / kept["one rank"]] if kept else []
    return [
        Bar("8 hosts: torch's 1D over 2.5d, in time", ">= 2", grid, lambda one: one >= 2),
        Bar("4 hosts: torch's 1D over columns_rows, in time", ">= 1.2", pair, lambda one: one >= 1.2),
        Bar("taken beside torch's best that fits, least", ">= 1.0 or in the spread", _least(against), lambda x: x >= 1),
        Bar("taken within 10 % of the fastest, share of cells", ">= 7/8", _share(near), lambda one: one >= 7 / 8),
        Bar("activations beside one rank's, most", "<= 1/3", share, lambda one: one <= 1 / 3),
    ]


def _faster(one: Found, slow: str, fast: str) -> float:
    return _seconds(one, slow) / _seconds(one, fast)


def _beside(one: Found, taken: str, best: str, near: float = 1.0) -> float:
    """Times as fast as the best; 1 where ranges of the rounds touch."""
    if min(one["seconds"][taken]) <= near * max(one["seconds"][best]):
        return max(1.0, _faster(one, best, taken))
    return near * _faster(one, best, taken)


def _least(figures: Sequence[float]) -> list[float]:
    return [min(figures)] if figures else []


def _share(figures: Sequence[float]) -> list[float]:
    return [sum(one >= 1 for one in figures) / len(figures)] if figures else []


if __name__ == "__main__":
    sys.exit(main())
