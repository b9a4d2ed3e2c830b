"""DCT as published, on replicas of a pipeline: python -m benchmarks.edges.dct [--small]   (root, iproute2)

Two replicas of two stages, a host each, at 100 Mbit/s. Thresholds on gradients between replicas, on edges between
stages, on both, on neither; every way is trained live, three seeds. Every cell is a file under dct/, made once. Writes
dct.md.

Source: Gupta et al., Training Recommender Models with Dynamic Communication Thresholds (KDD 2021), hybrid parallelism.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.edges.dct_job import WAYS
from benchmarks.measuring.cells import Cells
from benchmarks.netlab import Lab

HERE = Path(__file__).parent
HOSTS, MBIT = 4, 100.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny model, nothing is kept")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--out", type=Path, default=HERE / "dct", help="where cells are kept, dct.md beside it")
    asked = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        out, seeds, steps = (Path(folder), 1, 4) if asked.small else (asked.out, 3, asked.steps)
        cells = Cells(out, {"steps": steps, "small": asked.small, "mbit": MBIT})
        found = [cells.once(f"seed{seed}", partial(_trained, seed, steps, asked.small)) for seed in range(seeds)]
    text = page(found)
    print(text)
    if not asked.small:
        (out.parent / "dct.md").write_text(text)
    return 0


def _trained(seed: int, steps: int, is_small: bool) -> dict[str, Any]:
    with TemporaryDirectory() as folder, Lab(HOSTS, MBIT) as lab:
        kept = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.edges.dct_job", "--seed", str(seed)]
        command += ["--steps", str(steps), "--out", str(kept), *["--small"] * is_small]
        lab.run(command, timeout_seconds=1800, pin=True)
        found: dict[str, Any] = json.loads(kept.read_text())
    return found


def page(found: Sequence[dict[str, Any]]) -> str:
    """The table, in Markdown. found: of every seed."""
    lines = [
        f"2 replicas x 2 stages, {HOSTS} hosts at {MBIT:g} Mbit/s, {found[0]['steps']} steps, {len(found)} seeds; "
        f"{found[0]['machine']}", "",
        "| DCT | ms a step (seeds) | times as fast (seeds) | KB a host and step | held-out loss (seeds) | over none |",
        "|" + " --- |" * 6,
    ]  # fmt: skip
    plain = [one["ways"]["none"] for one in found]
    for way in WAYS:
        mine = [one["ways"][way] for one in found]
        times = [a["step_seconds"] / b["step_seconds"] for a, b in zip(plain, mine, strict=True)]
        losses = [one["loss"] for one in mine]
        over = statistics.fmean(losses) / statistics.fmean(one["loss"] for one in plain) - 1
        seconds, sent = [1e3 * one["step_seconds"] for one in mine], [one["sent_bytes"] / 1e3 for one in mine]
        cells = [way, _spread(seconds, 1), _spread(times, 2), f"{statistics.median(sent):.1f}", _spread(losses, 4)]
        lines.append(f"| {' | '.join([*cells, f'{over:+.1%}'])} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    least, most = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


if __name__ == "__main__":
    raise SystemExit(main())
