"""Values sent and latency of a cut model: python -m benchmarks.repurpose.run

Needs Debian's dataset-fashion-mnist, and for latencies root and iproute2. Nets are trained once; every cell is made
once and kept under results/, so the page may be made over several calls. Exit code 1 if a bar is missed.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from armillary.repurpose.cut_chain import NeuronPlacement
from armillary.repurpose.layer_chain import read
from armillary.repurpose.restructuring import Steps
from armillary.repurpose.search import searched
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells
from benchmarks.measuring.command import Benchmark, command
from benchmarks.measuring.record import machine, machines
from benchmarks.netlab.lab import Lab
from benchmarks.repurpose.nets import FOLDER, JUDGES, KEPT, NETS, accuracy, calibration, images, trained

HERE = Path(__file__).parent
WORKERS, SEEDS, DROP = 4, (0, 1, 2), 0.01
STEPS = {
    "all three": Steps(),
    "pruning alone": Steps(assign=False, adjust=False),
    "without assigning": Steps(assign=False),
    "without adjusting": Steps(adjust=False),
}
MBITS, BATCHES = (10, 100, 1), (1, 32)  # the slowest link last: it takes minutes
SERVED = {"ours": "all three", "contiguous, pruned": "pruning alone"}  # on the links, seed 0


def _make(cells: Cells, is_small: bool, only: str | None) -> None:
    seeds = SEEDS[:1] if is_small else SEEDS
    if only != "latency":
        for name, steps, seed in ((name, steps, seed) for name in NETS for seed in seeds for steps in STEPS):
            cells.once(f"cuts/{name}, {seed}, {steps}", lambda: _cut(name, seed, steps, is_small))  # noqa: B023
    if only != "cuts":
        mbits = (100,) if is_small else MBITS
        for mbit, name, batch in ((mbit, name, batch) for mbit in mbits for name in NETS for batch in BATCHES):
            cells.once(f"latency/{name}, {mbit}, {batch}", lambda: _latency(name, mbit, batch, is_small))  # noqa: B023


def _searched(name: str, seed: int, steps: str, is_small: bool) -> Any:
    x, labels = images("train")
    model = trained(name, seed, is_small)
    some = calibration(name, x, is_small)
    placement = NeuronPlacement((1 / WORKERS,) * WORKERS, is_spread=True)
    chain = read(model, some[0])
    many = 500 if is_small else JUDGES[name]
    judge = (x[-many:], labels[-many:])
    return searched(chain, some, lambda one: accuracy(one, *judge), placement, DROP, STEPS[steps])


def _cut(name: str, seed: int, steps: str, is_small: bool) -> Mapping[str, Any]:
    x, labels = images("t10k")
    whole = accuracy(trained(name, seed, is_small), x, labels)
    began = time.perf_counter()
    shards = _searched(name, seed, steps, is_small)
    seconds = time.perf_counter() - began
    taken = shards.curve[shards.chosen]
    folder = _folder(name, seed, steps, is_small)
    shards.save(folder)
    return {
        "whole": whole,
        "cut": accuracy(shards.model(), x, labels),
        "sent": taken.sent,
        "plain": taken.plain,
        "seconds": seconds,
        "curve": [[one.sent / one.plain, one.measured] for one in shards.curve],
        "layers": [[one.name, one.sent, one.plain, one.kept] for one in shards.cut.traffic()],
        "machine": machine(),
    }


def _folder(name: str, seed: int, steps: str, is_small: bool) -> Path:
    """Where the shards of a cut lie for the cells that serve them."""
    return KEPT / f"shards{'-small' * is_small}" / f"{name}-{seed}" / steps


def _latency(name: str, mbit: int, batch: int, is_small: bool) -> Mapping[str, Any]:
    with TemporaryDirectory() as folder, Lab(WORKERS, mbit) as lab:
        (Path(folder) / "shards").mkdir()
        for contender, steps in SERVED.items():
            kept = _folder(name, 0, steps, is_small)
            if not (kept / "index.json").is_file():
                _searched(name, 0, steps, is_small).save(kept)
            (Path(folder) / "shards" / contender).symlink_to(kept)
        requests, warm, rounds = (40, 10, 3) if batch == 1 else (10, 2, 3) if mbit > 1 else (2, 1, 2)
        if is_small:
            requests, warm, rounds = 2, 1, 1
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.repurpose.job", "--net", name]
        command += ["--batch", str(batch), "--requests", str(requests), "--warm", str(warm)]
        command += ["--rounds", str(rounds), *["--small"] * is_small]
        out = Path(folder) / "found.json"
        lab.run([*command, "--shards", f"{folder}/shards", "--out", str(out)], timeout_seconds=400, pin=True)
        return {"blocks": json.loads(out.read_text()), "requests": requests, "machine": machine()}


def page(found: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[Bar]]:
    """Tables of the cells that are made, and the bars."""
    cuts = {
        tuple(name.removeprefix("cuts/").split(", ")): one for name, one in found.items() if name.startswith("cuts/")
    }
    timed = {
        tuple(name.removeprefix("latency/").split(", ")): one
        for name, one in found.items()
        if name.startswith("latency/")
    }
    lines = [
        f"{WORKERS} workers, at most {100 * DROP:g} point lost; {machines(one['machine'] for one in found.values())}"
    ]
    lines += [
        "",
        "## Values sent",
        "",
        "Means over seeds, with the smallest and the largest. Accuracy is that of the test split.",
        "",
    ]
    lines += [
        "| net | steps | seeds | values sent of a plain cut's | whole, % | lost, points | s a search |",
        "| --- " * 7 + "|",
    ]
    for name, steps in ((name, steps) for name in NETS for steps in STEPS):
        those = [one for (net, _, some), one in cuts.items() if (net, some) == (name, steps)]
        if those:
            share = _spread([one["sent"] / one["plain"] for one in those])
            lost = _spread([100 * (one["whole"] - one["cut"]) for one in those])
            whole = statistics.mean(100 * one["whole"] for one in those)
            seconds = statistics.mean(one["seconds"] for one in those)
            lines.append(f"| {name} | {steps} | {len(those)} | {share} | {whole:.2f} | {lost} | {seconds:.0f} |")
    lines += [
        "",
        "## Layers, seed 0, all three steps",
        "",
        "| net | layer | values sent | by a plain cut | weights kept |",
        "| --- " * 5 + "|",
    ]
    for name in NETS:
        rows = cuts.get((name, "0", "all three"), {}).get("layers", [])
        lines += [f"| {name} | {layer} | {sent} | {plain} | {kept:.2f} |" for layer, sent, plain, kept in rows]
    lines += ["", "## Latency", "", "Milliseconds a request: the smallest, the median and the largest of rounds.", ""]
    lines += ["| net | Mbit/s | batch | contender | ms | times as long as ours |", "| --- " * 6 + "|"]
    for (name, mbit, batch), one in sorted(
        timed.items(), key=lambda item: (item[0][0], int(item[0][1]), int(item[0][2]))
    ):
        ours = statistics.median(one["blocks"]["ours"])
        for contender, blocks in one["blocks"].items():
            times = statistics.median(blocks) / ours
            ms = " - ".join(f"{1e3 * take(blocks):.1f}" for take in (min, statistics.median, max))
            lines.append(f"| {name} | {mbit} | {batch} | {contender} | {ms} | {times:.2f} |")
    bars = _bars(cuts, timed)
    return [*lines, "", "## Bars", "", *table(bars)], bars


def _bars(cuts: Mapping[Any, Mapping[str, Any]], timed: Mapping[Any, Mapping[str, Any]]) -> list[Bar]:
    bars = []
    for name in NETS:
        both = [
            (cuts.get((name, str(seed), "all three")), cuts.get((name, str(seed), "pruning alone"))) for seed in SEEDS
        ]
        ours = [one for one, _ in both if one]
        share = [statistics.mean(one["sent"] / one["plain"] for one in ours)] if len(ours) == len(SEEDS) else []
        lost = [max(100 * (one["whole"] - one["cut"]) for one in ours)] if share else []
        beside = (
            [statistics.mean(one["sent"] / other["sent"] for one, other in both if one and other)]
            if all(map(all, both))
            else []
        )
        bars.append(Bar(f"{name}: values sent, of a plain cut's", "0.4 or less", share, lambda it: it <= 0.4))
        bars.append(Bar(f"{name}: of the contiguous cut's with pruning", "0.6 or less", beside, lambda it: it <= 0.6))
        bars.append(Bar(f"{name}: points lost on the test split, worst seed", "1 or less", lost, lambda it: it <= 1))
    for mbit, wanted in ((1, 2.0), (10, 1.5)):
        for name in NETS:
            for batch in BATCHES:
                blocks = timed.get((name, str(mbit), str(batch)), {}).get("blocks", {})
                peers = [
                    statistics.median(seconds)
                    for who, seconds in blocks.items()
                    if who.startswith("torch" if name == "mlp" else "contiguous")
                ]
                times = [min(peers) / statistics.median(blocks["ours"])] if blocks else []
                says = f"{name}, {mbit} Mbit/s, batch {batch}: the best peer's time, of ours"
                bars.append(Bar(says, f"{wanted:g} or more", times, lambda it, wanted=wanted: it >= wanted))
    return bars


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(
        command(__doc__, Benchmark(HERE, {"workers": WORKERS, "drop": DROP}, _make, page, ("cuts", "latency"), FOLDER))
    )
