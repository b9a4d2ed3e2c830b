"""Starts scripts again and again: python -m benchmarks.start_up.run

A start that is in results/ is not made again, so a run that was stopped goes on where it was; `--minutes` stops it
after the start under way. Writes figures.md from what is kept. Exit code 1 if a bar is missed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.measuring.bars import missed
from benchmarks.measuring.record import machine
from benchmarks.start_up.job import LONG, SHORT
from benchmarks.start_up.page import WAYS, bars, page
from benchmarks.start_up.scripts import SCRIPTS

HERE = Path(__file__).parent
STARTS, TURNS = 10, 5
SECONDS = 120  # of one start, at most
# As an installed package has it, torch too: pip compiles on installation. The first start of all compiles the rest.
WITH_BYTECODE = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}


class Start(NamedTuple):
    """way: DDP, the one line in an empty folder, or in one that an earlier start left."""

    script: str
    way: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.script}/{self.way}/{self.number}"

    @property
    def steps(self) -> int:
        return LONG if self.way == "empty" and self.number < TURNS else SHORT


def starts() -> Iterator[Start]:
    """By turns: one start of every script and way, then the next."""
    for number in range(STARTS):
        for script in SCRIPTS:
            ways = WAYS if script in PLANNED else ("empty",)
            for way in ways:
                if number < TURNS or (script in PLANNED and way != "DDP"):
                    yield Start(script, way, number)


PLANNED = ("recommender", "tied GPT")  # whose plans are compared, and whose start is timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--report", action="store_true", help="start nothing")
    parser.add_argument("--small", action="store_true", help="does it work? One start of each way, nothing is kept")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "start_up.json")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    if options.small:
        with TemporaryDirectory() as folder:
            print(page({one.name: made(one, Path(folder)) for one in starts() if one[0::2] == ("recommender", 0)}))
        return 0
    found = json.loads(options.results.read_text()) if options.results.exists() else {}
    folders = options.results.parent.parent.parent.parent / ".cache" / "start_up"  # kept between calls
    for one in starts():
        if options.report or time.monotonic() > until or one.name in found:
            continue
        found[one.name] = made(one, folders)
        found["machine"] = machine()
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{one.name}: {found[one.name]['first_step_seconds']:.1f} s to the end of step 1", flush=True)
    text = page(found)
    (HERE / "figures.md").write_text(text)
    print(text)
    return int(bool(missed(bars(found))))


def made(one: Start, folders: Path) -> Mapping[str, Any]:
    """One start. Folders of an earlier start are those of the same script's first in an empty one."""
    keep = folders / f"{one.script}-{0 if one.way == 'kept' else one.number}".replace(" ", "-")
    if one.way == "empty":
        shutil.rmtree(keep, ignore_errors=True)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        job = ["-m", "benchmarks.start_up.job", "--script", one.script, "--steps", str(one.steps), "--out", str(out)]
        if one.way != "DDP":
            job += ["--keep", str(keep)]
        ranks = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*ranks, *job], timeout=SECONDS, capture_output=True, text=True, check=False, env=WITH_BYTECODE
        )
        if done.returncode:
            raise RuntimeError(f"{one.name} ended with {done.returncode}:\n{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text())
    if one.way == "empty":
        found |= {noun: json.loads((keep / f"{noun}.json").read_text()) for noun in ("topology", "profile")}
    return found


if __name__ == "__main__":
    raise SystemExit(main())
