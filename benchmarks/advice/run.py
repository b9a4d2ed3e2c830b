"""Advice beside measured steps: python -m benchmarks.advice.run [--small] [--model NAME] [--cells 1] [--report]

Four hosts of the network lab. Each model is measured there, advice is asked for these machines, and the first rows are
trained. Every cell is made once and kept under results/. Exit code 1 if the bar is missed.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring.bars import Bar, missed, table
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.measuring.page import written
from benchmarks.netlab import Lab, RankFailed

HERE = Path(__file__).parent
HOSTS, MBIT, STEPS, FIRST = 4, 100, 24, 4
APART, PAIRS, IN_ORDER = 1.2, 10, 0.9
ARMILLARY = [sys.executable, "-W", "ignore", "-c", "from armillary.cli.main import main; main()"]
MODELS: Mapping[str, str] = {
    "vision": "vision --set data=patterns --set norm=group --set batch_size=16",
    "language_model": "language_model --set corpus=synthetic --set vocabulary=20000 --set width=64 --set hidden=64",
    "recommender": "recommender --set data=latent_factors --set rows=20000 --set width=16 --set batch_size=64",
}
SMALL: Mapping[str, str] = {name: f"{name} --small" for name in MODELS}
Found = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="does it work? Its figures say nothing")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--model", choices=tuple(MODELS))
    parser.add_argument("--cells", type=int, default=0, help="to make at most, then stop; 0: all")
    asked = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "results" if asked.small else HERE / "results"
        cells = Cells(kept, {"small": asked.small, "hosts": HOSTS, "mbit": MBIT, "steps": STEPS}, asked.cells)
        names = (asked.model,) if asked.model else tuple(MODELS)[: 1 if asked.small else None]
        try:
            for name in () if asked.report else names:
                _measured(cells, name, (SMALL if asked.small else MODELS)[name], 2 if asked.small else FIRST)
        except Enough:
            pass
        found = {path.stem: json.loads(path.read_text()) for path in sorted(kept.glob("*.json"))}
    lines, bars = page({name: one for name, one in found.items() if name != "settings"})
    print("\n".join(lines) if asked.small else written(HERE, lines))
    return int(bool(missed(bars)))


def _measured(cells: Cells, name: str, typed: str, first: int) -> None:
    """The advice of a model, then its first rows."""
    rows = cells.once(name, lambda: _advised(typed))["rows"]
    for row in rows[:first]:
        cells.once(f"{name}; {row['method']}", lambda: _trained(row))  # noqa: B023


def _advised(typed: str) -> Mapping[str, Any]:
    """The rows that are trained by a command, the quickest first; plain all-reduce last, against which all are held."""
    with TemporaryDirectory() as folder, Lab(HOSTS, MBIT) as lab:
        files = [str(Path(folder) / one) for one in ("topology.json", "profile.json")]
        _run(lab, ["measure", *shlex.split(typed), "--out", folder])
        asked = ["advise", *shlex.split(typed), "--topology", files[0], "--profile", files[1], "--json"]
        done = subprocess.run([*ARMILLARY, *asked], capture_output=True, text=True, timeout=400, check=True)
    found = json.loads(done.stdout)
    rows = [row for row in found["rows"] if row["fits"] and row["shell"].startswith("armillary train")]
    ways = [{"method": row["method"], "shell": row["shell"], "seconds": row["forecast"]["seconds"]} for row in rows]
    return {"bottleneck": found["bottleneck"], "rows": [*ways[: FIRST - 1], ways[-1]]}


def _trained(row: Mapping[str, Any]) -> Mapping[str, Any]:
    words = shlex.split(row["shell"])[1:]
    at = words.index("--workers")
    kept = {"method": row["method"], "forecast_seconds": row["seconds"]}
    try:
        with TemporaryDirectory() as folder, Lab(HOSTS, MBIT) as lab:
            said = _run(lab, [*words[:at], *words[at + 2 :], "--steps", str(STEPS), "--runs", folder, "--json"])
    except RankFailed as error:
        return {**kept, "refused": str(error).strip().rpartition("\n")[2]}
    return {**kept, "seconds": json.loads(said)["step_seconds"]}


def _run(lab: Lab, words: Sequence[str]) -> str:
    """What rank 0 prints."""
    return str(lab.run([*ARMILLARY, *words], timeout_seconds=400, pin=True).outputs[0])


def page(found: Found) -> tuple[list[str], list[Bar]]:
    """A table of every row that was trained, and the bar over the pairs."""
    lines = ["| model | method | forecast ms | measured ms | forecast / measured |", "|" + " --- |" * 5]
    right, apart = 0, 0
    for name in MODELS:
        rows = [one for cell, one in found.items() if cell.startswith(f"{name}; ")]
        rows.sort(key=lambda one: one["forecast_seconds"])
        for one in rows:
            forecast, seconds = one["forecast_seconds"], one.get("seconds")
            if seconds is None:
                lines.append(f"| {name} | {one['method']} | {forecast * 1e3:.1f} | refused: {one['refused']} | |")
                continue
            cells = (f"{forecast * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{forecast / seconds:.2f}")
            lines.append(f"| {name} | {one['method']} | {' | '.join(cells)} |")
        for quicker, slower in combinations([one for one in rows if "seconds" in one], 2):
            if slower["forecast_seconds"] > APART * quicker["forecast_seconds"]:
                apart += 1
                right += quicker["seconds"] < slower["seconds"]
    bars = [
        Bar(
            "pairs whose forecasts differ by more than 20 %",
            f">= {PAIRS}",
            [apart] if found else [],
            lambda it: it >= PAIRS,
            0,
        ),
        Bar("of them measured in the order forecast", f">= {IN_ORDER}", [right / apart] if apart else [], _is_enough),
    ]
    said = [f"* {name}: {one['bottleneck']}" for name in MODELS if (one := found.get(name))]
    return [f"{HOSTS} hosts at {MBIT} Mbit/s, {STEPS} steps each.", "", *said, "", *lines, "", *table(bars)], bars


def _is_enough(share: float) -> bool:
    return share >= IN_ORDER


if __name__ == "__main__":
    sys.exit(main())
