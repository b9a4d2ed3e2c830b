"""Lossy exchanges beside DDP and its hooks: python -m benchmarks.lossy.run [--small] [--task perceptron]

Time to a metric is a trajectory times seconds a step. Trajectories of ours come from one process in lockstep; those of
torch's hooks from a job on loopback, since they are torch's own code. Seconds come from the network lab, in paired
rounds. One cell is also run live, end to end. Every cell is a file under results/, and one that is there is not run
again. Writes README.md's tables. --small: made-up data and few steps; its figures say nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lossy.contenders import EXACT, OURS, PEERS, same_training
from benchmarks.lossy.report import page
from benchmarks.lossy.tasks import TASKS
from benchmarks.lossy.trajectory import trajectory
from benchmarks.netlab import Lab, LabUnavailable

HERE = Path(__file__).parent
WORKERS = 4
SPEEDS = (100, 300, 1000, 0)  # Mbit/s; 0: loopback's own speed
LIVE = ("int8", 100)  # the cell that is run end to end
LOOKS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options(arguments)
    torch.set_num_threads(1)
    steps, seeds = (6, 1) if asked.small else (asked.steps, 3)
    looks = sorted({round(steps * k / LOOKS) for k in range(LOOKS + 1)})
    speeds = asked.mbit or ((30,) if asked.small else SPEEDS)
    for task in asked.task:
        workload = TASKS[task].workload(asked.small, _data(asked, task))
        folder = asked.out / task
        for seed in range(seeds):
            for name in OURS:
                path = folder / f"trajectory_{name}_seed{seed}.json"
                _once(path, lambda: trajectory(name, TASKS[task], workload, seed, looks, WORKERS)._asdict())  # noqa: B023
            for name in dict.fromkeys(same_training(one) for one in PEERS):
                if name != EXACT:
                    _once(folder / f"trajectory_{name}_seed{seed}.json", _live(asked, task, name, seed, looks, 0))
        for mbit in speeds:
            _once(folder / f"seconds_{mbit:g}.json", _seconds(asked, task, mbit))
        live, speed = LIVE[0], LIVE[1] if LIVE[1] in speeds else speeds[0]
        _once(folder / f"live_{live}_{speed:g}.json", _live(asked, task, live, 0, looks, speed))
    text = page(asked.out, {task: TASKS[task] for task in asked.task})
    print(text)
    if not asked.small:
        (HERE / "figures.md").write_text(text)
    return 0


def _once(path: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Makes the cell and keeps it, unless it is kept."""
    if path.is_file():
        return
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    print(f"{path.parent.name}/{path.stem}", flush=True)


def _seconds(asked: argparse.Namespace, task: str, mbit: float) -> Callable[[], dict[str, Any]]:
    rounds, steps = (1, 1) if asked.small else (asked.rounds, 10)
    names = ",".join((*OURS, *PEERS))
    return lambda: _job(asked, task, mbit, ["--contenders", names, "--rounds", str(rounds), "--steps", str(steps)])


def _live(
    asked: argparse.Namespace, task: str, name: str, seed: int, looks: Sequence[int], mbit: float
) -> Callable[[], dict[str, Any]]:
    words = ["--contenders", name, "--seed", str(seed), "--looks", ",".join(map(str, looks))]
    return lambda: _job(asked, task, mbit, words)


def _job(asked: argparse.Namespace, task: str, mbit: float, words: Sequence[str]) -> dict[str, Any]:
    out = asked.out / "job.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    more = [*(["--small"] if asked.small else []), *(["--data", data] if (data := _data(asked, task)) else [])]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lossy.job", "--task", task, "--mbit", str(mbit)]
    with Lab(WORKERS, mbit) as lab:
        lab.run([*command, *words, *more, "--out", str(out)], timeout_seconds=3600, pin=True)
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return found


def _data(asked: argparse.Namespace, task: str) -> str:
    return str({"perceptron": asked.images, "recommender": asked.ratings}[task])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--images", default="", help="of the perceptron: fashion-mnist, if nothing is said, or digits")
    parser.add_argument("--ratings", default="", help="of the recommender: MovieLens ratings or their folder")
    parser.add_argument("--mbit", type=float, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=1500, help="of a trajectory")
    parser.add_argument("--rounds", type=int, default=7, help="of timing")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except LabUnavailable as reason:
        raise SystemExit(f"no network lab here: {reason}") from None
