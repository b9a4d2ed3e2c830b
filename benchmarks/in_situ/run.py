"""A running solver feeds training: python -m benchmarks.in_situ.run [--at-most CELLS], and `... kills [COUNT]`.

Every figure is a cell that is made once and kept under results/; figures.md is written of what is there.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_situ.crossing import crossing
from benchmarks.in_situ.hosts import hosts, in_lab
from benchmarks.in_situ.kills import kills
from benchmarks.in_situ.wall_time import INFLOWS, error, first_epoch, slow_reader
from benchmarks.measuring.bars import Bar, missed, table
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machine

HERE = Path(__file__).parent
LAB_MBITS = (1000, 300)
HOSTS, SEEDS, WINDOWS, MIBS = (1, 2, 4, 8), (0, 1, 2), ("reservoir", "latest"), (1, 8)
WHOLE = {"crossing": 60, "hosts": 60, "steps": 40, "rounds": 3, "epoch": 200, "held": 240, "seconds": 30.0}
SMALL = {"crossing": 4, "hosts": 4, "steps": 4, "rounds": 1, "epoch": 66, "held": 24, "seconds": 2.0}
Found = Mapping[str, Any]


def cells_of(sizes: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Callable[[], Found]]:
    """What is measured, by name."""
    made: dict[str, Callable[[], Found]] = {}
    for mib in MIBS:
        made[f"crossing-{mib}"] = lambda mib=mib: crossing(mib, sizes["crossing"])
    for kind in ("files", "redis"):
        for count in counts:
            made[f"hosts-{kind}-{count}"] = lambda count=count, kind=kind: hosts(count, kind, sizes["hosts"])
    for mbit in LAB_MBITS:
        for count in counts:
            made[f"hosts-{mbit}-{count}"] = lambda count=count, mbit=mbit: in_lab(count, sizes["hosts"], mbit)
    made["slow_reader"] = lambda: slow_reader(sizes["steps"], sizes["rounds"])
    made["first_epoch"] = lambda: _first_epoch(sizes["epoch"])
    for inflow, window, seed in itertools.product(INFLOWS, WINDOWS, SEEDS):
        made[f"error-{inflow}-{window}-{seed}"] = partial(error, inflow, window, seed, sizes["held"], sizes["seconds"])
    return made


def _first_epoch(steps: int) -> Found:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        return first_epoch(steps, disk)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["all", "kills", "report"], default="all")
    parser.add_argument("count", nargs="?", type=int, default=200, help="kills")
    parser.add_argument("--at-most", type=int, default=0, help="cells to make now; 0: all")
    parser.add_argument("--small", action="store_true", help="that it runs, not what it measures; keeps nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, results = (SMALL, Path(tempfile.mkdtemp())) if options.small else (WHOLE, HERE / "results")
    if options.what == "kills":
        found = {"machine": machine(), "asked": options.count, **kills(options.count, seed=options.count)}
        (results / "kills.json").write_text(json.dumps(found, indent=1) + "\n")
    elif options.what == "all":
        cells = Cells(results, {"machine": machine(), **sizes}, options.at_most)
        try:
            for name, make in cells_of(sizes, HOSTS[:2] if options.small else HOSTS).items():
                cells.once(name, make)
        except Enough:
            print("more cells are to be made: say it again")
    lines = page(results)
    print("\n".join(lines) if options.small else written(HERE, lines))
    return bool(missed(bars(_records(results))))


def _records(results: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}


def _at_most(most: float) -> Callable[..., bool]:
    return lambda *ratios: max(ratios) <= most


def bars(of: Mapping[str, Any]) -> list[Bar]:
    """What the page is held to."""
    found = []
    for peer, most in (("Valkey, unix socket", 0.7), ("ADIOS2 SST", 1.0), ("TCPStore", 1.0), ("fresh files", 1.0)):
        ratios = [
            of[cell]["seconds"]["slots"]["sum"][1] / of[cell]["seconds"][peer]["sum"][1]
            for mib in MIBS
            if (cell := f"crossing-{mib}") in of and peer in of[cell]["seconds"]
        ]
        found.append(Bar(f"put and take, 1 and 8 MiB, of {peer}", f"<= {most}", ratios, _at_most(most)))
    growth = {
        kind: [of[f"hosts-{kind}-{n}"]["seconds"][1] / of[f"hosts-{kind}-1"]["seconds"][1] for n in HOSTS[1:]]
        for kind in ("files", LAB_MBITS[-1])
        if all(f"hosts-{kind}-{n}" in of for n in HOSTS)
    }
    flat, grows = growth.get("files", []), growth.get(LAB_MBITS[-1], [])
    found.append(Bar("2, 4, 8 hosts of 1, each its files", "<= 1.20", flat, _at_most(1.2)))
    found.append(
        Bar(
            f"2, 4, 8 hosts of 1, one Redis at {LAB_MBITS[-1]} Mbit/s",
            "8: > 1.20",
            grows,
            lambda *ratios: ratios[-1] > 1.2,
        )
    )
    slow = [of["slow_reader"]["beside"][1] / of["slow_reader"]["alone"][1]] if "slow_reader" in of else []
    found.append(Bar("solver's step beside a slow reader, of alone", "<= 1.05", slow, _at_most(1.05), 3))
    epoch = of.get("first_epoch")
    earlier = [epoch["written first"] / epoch["in situ"]] if epoch else []
    found.append(Bar("first epoch earlier than written first, times", ">= 3", earlier, lambda times: times >= 3))
    disk = [epoch["bytes on disk"]] if epoch else []
    found.append(Bar("bytes on disk", "0", disk, lambda count: count == 0, 0))
    for inflow in INFLOWS:
        names = [[f"error-{inflow}-{window}-{seed}" for seed in SEEDS] for window in WINDOWS]
        whole = all(name in of for part in names for name in part)
        both = [statistics.mean(of[name]["error"] for name in part) for part in names] if whole else []
        what = f"held-out error, {inflow} inflow: reservoir, latest only"
        found.append(Bar(what, "lower", both, lambda one, other: one < other, 3))
    if "kills" in of:
        parts = [of["kills"][kind] for kind in ("files", "redis")]
        bad = [sum(part["torn"] + part["twice"] + len(part["hangs"] + part["errors"]) for part in parts)]
        untold = [sum(max(0, part["missing"] - part["told lost"]) for part in parts)]
        killed = sum(sum(part["killed"].values()) for part in parts)
        found.append(Bar(f"{killed} kills: torn, twice, hangs", "0", bad, lambda count: count == 0, 0))
        found.append(Bar(f"{killed} kills: lost beyond what was told", "0", untold, lambda count: count == 0, 0))
    return found


def page(results: Path) -> list[str]:
    """The tables, in Markdown."""
    of = _records(results)
    lines = ["`python -m benchmarks.in_situ.run`", ""]
    lines += [f"{of['settings']['machine'] if 'settings' in of else 'nothing measured'}; medians (quartiles)", ""]
    lines += table(bars(of))
    for mib in MIBS:
        if cell := of.get(f"crossing-{mib}"):
            lines += ["", f"## Put and take of {mib} MiB on one node, ms", ""]
            lines += ["| way | put | take | both |", "| --- | --- | --- | --- |"]
            for way, seconds in cell["seconds"].items():
                lines.append(f"| {way} | " + " | ".join(_ms(seconds[part]) for part in ("put", "take", "sum")) + " |")
    lines += ["", "## Put and take of 1 MiB, four a second and host, ms", ""]
    behind = " | ".join(f"one Redis, {mbit} Mbit/s" for mbit in LAB_MBITS)
    lines += [f"| hosts | files of each | one Redis, loopback | {behind} |", "|" + " --- |" * 5]
    for count in HOSTS:
        shown = [
            _ms(of[cell]["seconds"]) if (cell := f"hosts-{kind}-{count}") in of else "-"
            for kind in ("files", "redis", *LAB_MBITS)
        ]
        lines.append(f"| {count} | {' | '.join(shown)} |")
    if slow := of.get("slow_reader"):
        lines += ["", f"Solver's step, ms: alone {_ms(slow['alone'])}, beside a slow reader {_ms(slow['beside'])}."]
    if epoch := of.get("first_epoch"):
        lines += ["", f"First epoch, s: in situ {epoch['in situ']:.1f}, written first {epoch['written first']:.1f}."]
    lines += ["", "## Held-out error at equal wall time; 1: nothing changes", ""]
    lines += ["| inflow | window | seed | error | batches | newest step |", "|" + " --- |" * 6]
    for inflow, window, seed in itertools.product(INFLOWS, WINDOWS, SEEDS):
        if cell := of.get(f"error-{inflow}-{window}-{seed}"):
            rest = f"{cell['error']:.3f} | {cell['batches']} | {cell['newest step']}"
            lines.append(f"| {inflow} | {window} | {seed} | {rest} |")
    if "kills" in of:
        lines += ["", "## Kills at random moments", ""]
        names = ("put", "trained", "missing", "told lost", "torn", "twice")
        lines += [f"| store | killed | {' | '.join(names)} | hangs |", "|" + " --- |" * (len(names) + 3)]
        for kind in ("files", "redis"):
            part = of["kills"][kind]
            killed = ", ".join(f"{name} {count}" for name, count in part["killed"].items())
            counts = " | ".join(str(part[name]) for name in names)
            lines.append(f"| {kind} | {killed} | {counts} | {len(part['hangs'])} |")
    return lines


def _ms(seconds: list[float]) -> str:
    low, median, high = (1e3 * one for one in seconds)
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
