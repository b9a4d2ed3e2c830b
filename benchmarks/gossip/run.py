"""Gossip beside D-PSGD: python -m benchmarks.gossip.run [--small] [--only quality|seconds] [--cells 1] [--report]

Quality comes from one process: ranks of a ring on scanned digits. Seconds come from four hosts of the network lab. Each
cell is made once and kept under results/, so the page may be made over several calls. Exit code 1 if a bar is missed.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gossip import forecast, quality
from benchmarks.gossip.timed import CONTENDERS, LIVE_FROM, LIVE_STEPS, SETTLED, WHOLE, workload
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, Found, command
from benchmarks.measuring.record import machines
from benchmarks.netlab import Lab

HERE = Path(__file__).parent
RANKS, STEPS, SEEDS, SPLITS = 8, 800, (0, 1, 2), ("shuffled", "by label")
HOSTS, MBIT, TURN = 4, 20, 6
TURNS = (("keep", 0), ("keep at 1.05", 0), ("all_reduce", 0), ("keep", 1))  # each between two turns of D-PSGD
SPANS = ((30, 60), (60, 110), (110, 160))  # of passes that the one process looks at


def _make(cells: Cells, is_small: bool, only: str | None) -> None:
    torch.set_num_threads(1)
    settled = cells.folder.parent / "settled" if is_small else HERE.parents[1] / ".cache" / "gossip"
    seeds, steps = (SEEDS[:1], 40) if is_small else (SEEDS, STEPS)
    if only != "seconds":
        for split, seed, way in ((split, seed, way) for split in SPLITS for seed in seeds for way in quality.WAYS):
            cells.once(f"quality/{split}; {way}; {seed}", lambda: quality.trained(split, way, seed, RANKS, steps))  # noqa: B023
        for name in ("keep", "keep at 1.05"):
            cells.once(f"passes/{name}", lambda: _passes(CONTENDERS[name], is_small))  # noqa: B023
    if only != "quality":
        for name, number in TURNS[: 3 if is_small else None]:
            turns = f"{WHOLE},{name},{WHOLE}"
            cells.once(f"seconds/{name}; {number}", lambda: _job(settled, is_small, "time", turns))  # noqa: B023
        cells.once("seconds/live", lambda: _job(settled, is_small, "live"))


def _passes(choice: str, is_small: bool) -> Mapping[str, Any]:
    count = 50 if is_small else SPANS[-1][1]
    return {"sent_bytes": forecast.sent_by_pass(workload(is_small), choice, HOSTS, count).sent_bytes}


def _job(settled: Path, is_small: bool, what: str, turns: str = "") -> Mapping[str, Any]:
    if not (settled / "settled.json").is_file():
        settled.mkdir(parents=True, exist_ok=True)
        _run(settled, is_small, "settle", "", 0, 6 if is_small else SETTLED, settled / "settled.json")
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        steps = {"time": 2 if is_small else TURN, "live": 8 if is_small else LIVE_STEPS}[what]
        _run(settled, is_small, what, turns, MBIT, steps, out)
        found: Mapping[str, Any] = json.loads(out.read_text())
        return found


def _run(settled: Path, is_small: bool, what: str, turns: str, mbit: float, steps: int, out: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gossip.job", what, "--folder", str(settled)]
    command += ["--steps", str(steps), "--out", str(out), *(["--turns", turns] if turns else [])]
    with Lab(HOSTS, mbit) as lab:
        lab.run([*command, *["--small"] * is_small], timeout_seconds=600, pin=True)


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """Tables of the cells that are made, and the bars."""
    timed = [one for name, one in found.items() if name.startswith("seconds/")]
    lines = [f"{machines(one['machine'] for one in timed)}", ""] if timed else []
    lines += ["## Quality", "", f"{RANKS} ranks, {STEPS} steps; three seeds, in their order.", ""]
    lines += [
        "| split | way | tensors sent | values sent | bytes, of D-PSGD's | oldest copy | accuracy of the mean, % |"
    ]
    lines += ["| --- " * 7 + "|"]
    seen = {
        (split, way): those
        for split in SPLITS
        for way in quality.WAYS
        if (those := [one for seed in SEEDS if (one := found.get(f"quality/{split}; {way}; {seed}"))])
    }
    for (split, way), those in seen.items():
        tensors, values = (statistics.mean(one[field] for one in those) for field in ("tensors", "values"))
        best = seen.get((split, WHOLE), those)
        sent = statistics.mean(one["sent_bytes"] / other["sent_bytes"] for one, other in zip(those, best, strict=False))
        accuracy = ", ".join(f"{100 * one['accuracy']:.1f}" for one in those)
        oldest = max(one["oldest"] for one in those)
        lines.append(f"| {split} | {way} | {tensors:.2f} | {values:.2f} | {sent:.2f} | {oldest:.0f} | {accuracy} |")
    seconds, more = _of_seconds(found)
    bars = [*_of_quality(seen), *more]
    return [*lines, *seconds, "", "## Bars", "", *table(bars)], bars


def _of_quality(seen: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[Bar]:
    bars = []

    def lost(split: str, way: str) -> list[float]:
        pairs = zip(seen.get((split, WHOLE), ()), seen.get((split, way), ()), strict=False)
        points = [100 * (one["accuracy"] - other["accuracy"]) for one, other in pairs]
        return [statistics.mean(points)] if len(points) == len(SEEDS) else []

    for split, most in zip(SPLITS, (1, 2), strict=True):
        those = seen.get((split, "keep"), ())
        share = [statistics.mean(one["tensors"] for one in those)] if len(those) == len(SEEDS) else []
        bars.append(Bar(f"{split}: tensors sent by `keep`", "0.5 or less", share, lambda it: it <= 0.5))
        bars.append(
            Bar(
                f"{split}: points that `keep` loses", f"{most} or less", lost(split, "keep"), lambda it, m=most: it <= m
            )
        )
    said = "by label: points that `replace` loses, as published"
    bars.append(Bar(said, "5 or more", lost("by label", "replace, as published"), lambda it: it >= 5))
    return bars


def _of_seconds(found: Found) -> tuple[list[str], list[Bar]]:
    turns = [turn for name, one in found.items() if name.startswith("seconds/") for turn in one.get("turns", ())]
    lines = [
        "",
        "## Seconds",
        "",
        f"{HOSTS} hosts, {MBIT} Mbit/s, the perceptron; medians of turns, each in brackets.",
        "",
    ]
    lines += ["| contender | s a step | steps, times D-PSGD's | payload, of D-PSGD's |", "| --- " * 4 + "|"]
    taken, payload = {}, {}
    for name in CONTENDERS:
        mine = [turn for turn in turns if turn["contender"] == name]
        if mine:
            taken[name] = statistics.median(turn["step_seconds"] for turn in mine)
            payload[name] = statistics.mean(turn["sent_bytes"] for turn in mine)
            each = ", ".join(f"{turn['step_seconds']:.2f}" for turn in mine)
            times, share = taken[WHOLE] / taken[name], payload[name] / payload[WHOLE]
            lines.append(f"| {name} | {taken[name]:.2f} ({each}) | {times:.2f} | {share:.2f} |")
    faster = [taken[WHOLE] / taken["keep"]] if "keep" in taken else []
    share = [payload["keep"] / payload[WHOLE]] if "keep" in taken else []
    apart = list[float]()
    if WHOLE in taken:
        per_byte = taken[WHOLE] / found["passes/keep"]["sent_bytes"][0][0] if "passes/keep" in found else 0.0
        lines += _foreseen(found, per_byte, taken[WHOLE])
        if (live := found.get("seconds/live")) and "passes/keep" in found:
            last, whole = LIVE_FROM + live["steps"], taken[WHOLE] * live["steps"]
            said = forecast.took(forecast.Passes(found["passes/keep"]["sent_bytes"][LIVE_FROM:last]), per_byte)
            apart = [live["seconds"] / said - 1]
            lines += [
                "",
                f"Live, passes {LIVE_FROM} to {last} of `keep`: {live['seconds']:.1f} s, forecast {said:.1f} s.",
            ]
            lines += [f"D-PSGD takes {whole:.1f} s for as many."]
    return lines, [
        Bar("4 hosts: payload of `keep`, of D-PSGD's", "0.6 or less", share, lambda it: it <= 0.6),
        Bar("4 hosts: steps/s of `keep`, times D-PSGD's", "1.2 or more", faster, lambda it: it >= 1.2),
        Bar("live: seconds beyond the forecast", "within 0.1", apart, lambda it: abs(it) <= 0.1),
    ]


def _foreseen(found: Found, per_byte: float, whole: float) -> list[str]:
    """What one process says of later passes, at the seconds a byte that D-PSGD takes."""
    lines = ["", "As one process foresees them, by stretches of passes:", ""]
    lines += ["| contender | passes | payload, of D-PSGD's | s a step | steps, times D-PSGD's |", "| --- " * 5 + "|"]
    for name in CONTENDERS:
        sent = found.get(f"passes/{name}", {}).get("sent_bytes", [])
        for first, last in SPANS if len(sent) == SPANS[-1][1] else ():
            those = forecast.Passes(sent[first:last])
            share = statistics.mean(statistics.mean(ranks) for ranks in those.sent_bytes) / sent[0][0]
            seconds = forecast.took(those, per_byte) / (last - first)
            lines.append(f"| {name} | {first} to {last} | {share:.2f} | {seconds:.2f} | {whole / seconds:.2f} |")
    return lines


if __name__ == "__main__":
    sys.exit(command(__doc__, Benchmark(HERE, {"ranks": RANKS, "mbit": MBIT}, _make, page, ("quality", "seconds"))))
