"""Runs every distinct line to type of `armillary advise`: of each method and combination, where it first applies."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

OWN = "own_models.py"
SMALL = ("recommender", "vision", "language_model", "translation")
ARMILLARY = [sys.executable, "-W", "ignore", "-c", "from armillary.cli.main import main; main()"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LIMIT_SECONDS = 900  # of a line, even on a machine that is busy with others


class Job(NamedTuple):
    workload: str
    workers: int


JOBS = (
    *(Job(f"{OWN} --set kind={kind}", 2) for kind in ("chain", "blocks")),
    *(Job(f"{name} --small", 2) for name in SMALL),
    Job(f"{OWN} --set kind=tables", 4),  # two axes of a mesh
)


def advised(job: Job, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, what has a line to type."""
    asked = [*ARMILLARY, "advise", *shlex.split(job.workload), "--workers", str(job.workers), "--gbit", "0.1"]
    done = subprocess.run([*asked, "--json"], cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise SystemExit(f"advice: {' '.join(asked[-5:])} failed:\n{done.stderr[-1500:]}")
    found = json.loads(done.stdout)
    yield from ((row["method"], row) for row in found["rows"] if row["applies"])
    yield from ((one["name"], one) for one in found["combinations"])


def command(one: dict[str, Any], job: Job, folder: Path) -> list[str]:
    if one["shell"]:
        words = shlex.split(one["shell"])[1:]
        return [*ARMILLARY, *words, *(["--steps", "2"] if words[0] == "train" else [])]
    script = folder / "advised.py"
    script.write_text(one["python"] + "\n")
    launch = [*TORCHRUN, str(job.workers)] if "under torchrun" in one["python"] else [sys.executable, "-W", "ignore"]
    return [*launch, str(script)]


def main(wanted: list[str]) -> int:
    """
    Args:
        wanted: names of methods and combinations; none: all.
    """
    done, failed = set[str](), 0
    for job in JOBS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            shutil.copy(Path(__file__).with_name(OWN), folder)
            for name, one in advised(job, folder):
                if name in done or (wanted and name not in wanted):
                    continue
                done.add(name)
                began, line = time.perf_counter(), command(one, job, folder)
                ran = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS)
                said = "runs"
                if ran.returncode:
                    said = f"FAILS ({ran.returncode}):\n{ran.stdout[-800:]}{ran.stderr[-1500:]}"
                    failed += 1
                seconds = time.perf_counter() - began
                print(f"advice: {name} on {job.workload}: {said}, {seconds:.0f} s", flush=True)
    print(f"advice: {len(done)} lines, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
