"""Coded edges beside uncoded ones: python -m benchmarks.edges.run [--small]   (root, iproute2; tens of minutes)

Two and four stages, a host each. The link is set so that what stage 0 sends in a step, uncoded, takes three times as
long as the step does without a limit; then once more without a limit, where coding must lose. Losses are of one
process, three seeds, after equal steps. Every cell is a file under results/, and one that is there is not run again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.edges.contenders import CODED, TORCH, UNCODED
from benchmarks.edges.task import BIG, SMALL
from benchmarks.edges.trajectory import trajectory
from benchmarks.netlab import Lab

HERE = Path(__file__).parent
STAGES = (2, 4)
TIMES_COMPUTE = 3
LOOKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model on 2 hosts, nothing is kept")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    parser.add_argument("--steps", type=int, default=240, help="of every trajectory")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        out = Path(folder) if asked.small else HERE / "results"
        for stages in (2,) if asked.small else asked.stages:
            _measure(out, stages, asked)
        text = page(out)
    print(text)
    if not asked.small:
        (HERE / "figures.md").write_text(text)
    return 0


def _measure(out: Path, stages: int, asked: argparse.Namespace) -> None:
    sizes, seeds, steps = (SMALL, 1, 2) if asked.small else (BIG, 3, asked.steps)
    looks = [steps * part // LOOKS for part in range(LOOKS + 1)]
    free, slow = (out / f"seconds_{stages}_{cell}.json" for cell in ("free", "slow"))
    _once(free, lambda: _timed(stages, 0.0, asked))
    alone = _median(json.loads(free.read_text()), UNCODED)
    mbit = 30.0 if asked.small else 8e-6 * alone["sent_bytes"] / (TIMES_COMPUTE * alone["step_seconds"])
    _once(slow, lambda: _timed(stages, mbit, asked))
    for name in CODED:
        for seed in range(seeds):
            path = out / f"loss_{stages}_{name.replace(' ', '_')}_{seed}.json"
            _once(path, lambda: {"steps": looks, "loss": trajectory(name, sizes, stages, seed, looks)})  # noqa: B023


def _timed(stages: int, mbit: float, asked: argparse.Namespace) -> dict[str, Any]:
    rounds, steps = ("1", "2") if asked.small else (str(asked.rounds), "8")
    with TemporaryDirectory() as folder, Lab(stages, mbit) as lab:
        kept = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.edges.job", "--rounds", rounds, "--steps", steps]
        lab.run([*command, "--out", str(kept), *["--small"] * asked.small], timeout_seconds=1800, pin=True)
        return {"mbit": mbit, "stages": stages, **json.loads(kept.read_text())}


def _once(path: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Makes the cell and keeps it, unless it is kept."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make()) + "\n")
        print(f"edges: {path.name}", file=sys.stderr, flush=True)


def _median(found: Mapping[str, Any], name: str) -> dict[str, float]:
    turns = [turn for turn in found["turns"] if turn["contender"] == name]
    return {key: statistics.median(turn[key] for turn in turns) for key in ("step_seconds", "sent_bytes")}


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
    return "\n".join(lines) + "\n"


def _row(name: str, slow: Mapping[str, Any], free: Mapping[str, Any], out: Path) -> str:
    by_round = {
        one: {turn["round"]: turn["step_seconds"] for turn in slow["turns"] if turn["contender"] == one}
        for one in (name, UNCODED)
    }
    ratios = sorted(by_round[UNCODED][number] / seconds for number, seconds in by_round[name].items())
    mine, seconds = _median(slow, name), sorted(by_round[name].values())
    losses = [_last_losses(out, slow["stages"], one) for one in (name, UNCODED)]
    told, over = "-", "-"
    if losses[0]:
        spread = f" ({statistics.stdev(losses[0]):.4f})" if len(losses[0]) > 1 else ""
        told = f"{statistics.fmean(losses[0]):.4f}{spread}"
        over = f"{statistics.fmean(losses[0]) / statistics.fmean(losses[1]) - 1:+.1%}"
    cells = [
        name, *(text or "-" for text in CODED.get(name, ("", ""))),
        f"{1e3 * mine['step_seconds']:.1f} ({1e3 * seconds[0]:.1f}-{1e3 * seconds[-1]:.1f})",
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
        f"{mine['sent_bytes'] / 1e3:.1f}", f"{slow['forecast_bytes'][name] / 1e3:.1f}",
        f"{1e3 * _median(free, name)['step_seconds']:.1f}", told, over,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _last_losses(out: Path, stages: int, name: str) -> list[float]:
    found = sorted(out.glob(f"loss_{stages}_{name.replace(' ', '_')}_[0-9].json"))
    return [json.loads(path.read_text())["loss"][-1] for path in found]


if __name__ == "__main__":
    raise SystemExit(main())
