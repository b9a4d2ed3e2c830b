"""Coded edges beside uncoded ones: python -m benchmarks.edges.run [--small] [--cells 1]   (root, iproute2)

Two and four stages, a host each. The link is set so that what stage 0 sends in a step, uncoded, takes three times as
long as the step does without a limit; then once more without a limit, where coding must lose. Losses are of one
process, three seeds, after equal steps. Every cell is a file under results/, and one that is there is not run again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.edges.contenders import CODED, TORCH, UNCODED
from benchmarks.edges.task import BIG, SMALL
from benchmarks.edges.trajectory import trajectory
from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.netlab import Lab

HERE = Path(__file__).parent
STAGES = (2, 4)
TIMES_COMPUTE = 3
HELPS = 1.15  # times uncoded; what is less a plan calls no help
LOOKS = 8
KINDS = ("step_seconds", "sent_bytes", "received_bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model on 2 hosts, nothing is kept")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    parser.add_argument("--steps", type=int, default=240, help="of every trajectory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=0, help="to make at most, then stop; 0: all")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where cells are kept, figures.md beside it")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        out = Path(folder) if asked.small else asked.out
        settings = {"steps": asked.steps, "rounds": asked.rounds, "small": asked.small}
        try:
            cells = Cells(out, settings, asked.cells)
            for stages in (2,) if asked.small else asked.stages:
                _measure(cells, stages, asked)
        except Enough:
            print(f"edges: {asked.cells} cells made; run it again for the others")
            return 0
        text = page(out)
    print(text)
    if not asked.small:
        (out.parent / "figures.md").write_text(text)
    return 0


def _measure(cells: Cells, stages: int, asked: argparse.Namespace) -> None:
    sizes, seeds, steps = (SMALL, 1, 2) if asked.small else (BIG, 3, asked.steps)
    looks = [steps * part // LOOKS for part in range(LOOKS + 1)]
    alone = _median(cells.once(f"seconds_{stages}_free", lambda: _timed(stages, 0.0, asked)), UNCODED)
    mbit = 30.0 if asked.small else 8e-6 * alone["sent_bytes"] / (TIMES_COMPUTE * alone["step_seconds"])
    cells.once(f"seconds_{stages}_slow", lambda: _timed(stages, mbit, asked))
    for name in CODED:
        for seed in range(seeds):
            cells.once(
                f"loss_{stages}_{name.replace(' ', '_')}_{seed}",
                lambda: {"steps": looks, "loss": trajectory(name, sizes, stages, seed, looks)},  # noqa: B023
            )


def _timed(stages: int, mbit: float, asked: argparse.Namespace) -> dict[str, Any]:
    rounds, steps = ("1", "2") if asked.small else (str(asked.rounds), "8")
    with TemporaryDirectory() as folder, Lab(stages, mbit) as lab:
        kept = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.edges.job", "--rounds", rounds, "--steps", steps]
        lab.run([*command, "--out", str(kept), *["--small"] * asked.small], timeout_seconds=1800, pin=True)
        return {"mbit": mbit, "stages": stages, **json.loads(kept.read_text())}


def _median(found: Mapping[str, Any], name: str) -> dict[str, float]:
    turns = [turn for turn in found["turns"] if turn["contender"] == name]
    return {key: statistics.median(turn[key] for turn in turns) for key in KINDS}


def page(out: Path) -> str:
    """The tables, in Markdown."""
    lines: list[str] = []
    for path in sorted(out.glob("seconds_*_slow.json")):
        slow = json.loads(path.read_text())
        free = json.loads(path.with_name(path.name.replace("slow", "free")).read_text())
        lines += [
            f"{slow['stages']} stages, {slow['mbit']:.1f} Mbit/s (uncoded activations take {TIMES_COMPUTE} times a "
            f"step without a limit); {slow['machine']}", "",
            "| contender | edge | back | ms a step (rounds) | times uncoded (rounds) | KB sent by stage 0 | forecast "
            "| no limit: ms a step | loss (spread of seeds) | over uncoded |", "|" + " --- |" * 10,
        ]  # fmt: skip
        lines += [_row(name, slow, free, out) for name in (*CODED, TORCH)] + [""]
        lines += [*table(bars(slow, free, out)), ""]
    return "\n".join(lines) + "\n"


def _row(name: str, slow: Mapping[str, Any], free: Mapping[str, Any], out: Path) -> str:
    ratios = _over_uncoded(slow, name)
    mine, seconds = _median(slow, name), sorted(_seconds_by_round(slow, name).values())
    losses = _last_losses(out, slow["stages"], name)
    told = "-"
    if losses:
        spread = f" ({statistics.stdev(losses):.4f})" if len(losses) > 1 else ""
        told = f"{statistics.fmean(losses):.4f}{spread}"
    worse = _worse(out, slow["stages"], name)
    cells = [
        name, *(text or "-" for text in CODED.get(name, ("", ""))),
        f"{1e3 * mine['step_seconds']:.1f} ({1e3 * seconds[0]:.1f}-{1e3 * seconds[-1]:.1f})",
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
        f"{mine['sent_bytes'] / 1e3:.1f}", f"{slow['forecast_bytes'][name] / 1e3:.1f}",
        f"{1e3 * _median(free, name)['step_seconds']:.1f}", told, f"{worse[0]:+.1%}" if worse else "-",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _seconds_by_round(found: Mapping[str, Any], name: str) -> dict[int, float]:
    return {turn["round"]: turn["step_seconds"] for turn in found["turns"] if turn["contender"] == name}


def _over_uncoded(found: Mapping[str, Any], name: str) -> list[float]:
    """Times as fast, of every round, the least first."""
    plain = _seconds_by_round(found, UNCODED)
    return sorted(plain[number] / seconds for number, seconds in _seconds_by_round(found, name).items())


def _worse(out: Path, stages: int, name: str) -> list[float]:
    """By how much of it its loss is above the uncoded one's; nothing where one is not trained."""
    mine, plain = (_last_losses(out, stages, one) for one in (name, UNCODED))
    return [statistics.fmean(mine) / statistics.fmean(plain) - 1] if mine and plain else []


def bars(slow: Mapping[str, Any], free: Mapping[str, Any], out: Path) -> list[Bar]:
    """What the page is to show of one number of stages."""
    rotated, sparse, thinned = "hadamard int4", "DCT", [name for name in CODED if name.startswith("top_k")]
    times = statistics.median(_over_uncoded(slow, rotated))
    crossed = [sum(_median(slow, name)[kind] for kind in KINDS[1:]) for name in (UNCODED, sparse)]
    quickest = max(statistics.median(_over_uncoded(free, name)) for name in CODED if name != UNCODED)
    warned = [any("is thinned for itself" in note for note in slow["notes"][name]) for name in thinned]
    idle = [any("coded edges do not help" in note for note in free["notes"][name]) for name in CODED if name != UNCODED]
    lost = [100 * each for each in _worse(out, slow["stages"], rotated)]
    stages = f"{slow['stages']} stages: "
    curves = [json.loads(path.read_text())["loss"] for path in _curves(out, slow["stages"], UNCODED)]
    learnt = [max(curve[-1] / curve[0] for curve in curves)] if curves else []
    return [
        Bar(f"{stages}uncoded held-out loss at the end, of what it was untrained, worst seed", "0.75 or less", learnt,
            lambda it: it <= 0.75),
        Bar(f"{stages}steps of {rotated}, times as fast as uncoded", "2.5 or more", [times], lambda it: it >= 2.5),
        Bar(f"{stages}loss of {rotated}, per cent above uncoded", "1 or less", lost, lambda it: it <= 1),
        Bar(f"{stages}bytes on the edge of stage 0, times fewer by {sparse}", "8 or more",
            [crossed[0] / crossed[1]], lambda it: it >= 8),
        Bar(f"{stages}no limit: the quickest coded steps, times as fast as uncoded", f"below {HELPS}", [quickest],
            lambda it: it < HELPS),
        Bar(f"{stages}no limit: plans that say that coded edges do not help", str(len(CODED) - 1), [sum(idle)],
            lambda it: it == len(CODED) - 1),
        Bar(f"{stages}plans that warn, of {len(thinned)} that thin gradients for themselves", str(len(thinned)),
            [sum(warned)], lambda it: it == len(thinned)),
    ]  # fmt: skip


def _last_losses(out: Path, stages: int, name: str) -> list[float]:
    return [json.loads(path.read_text())["loss"][-1] for path in _curves(out, stages, name)]


def _curves(out: Path, stages: int, name: str) -> list[Path]:
    return sorted(out.glob(f"loss_{stages}_{name.replace(' ', '_')}_[0-9].json"))


if __name__ == "__main__":
    raise SystemExit(main())
