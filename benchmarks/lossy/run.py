"""Lossy exchanges beside DDP and its hooks: python -m benchmarks.lossy.run [--small] [--task perceptron] [--cells 1]

Time to a metric is a trajectory times seconds a step. Trajectories of ours come from one process in lockstep; those of
torch's hooks from a job on loopback, since they are torch's own code. Seconds come from the network lab, in paired
rounds. One cell is also run live, end to end. Every cell is a file under results/, and one that is there is not run
again. Writes figures.md. --small: made-up data and few steps, of which nothing is kept; its figures say nothing.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.lossy.contenders import EXACT, OURS, PEERS, TO_THE_END, same_training
from benchmarks.lossy.report import page
from benchmarks.lossy.tasks import TASKS
from benchmarks.lossy.trajectory import to_the_end, trajectory
from benchmarks.measuring.cells import Cells, Enough
from benchmarks.netlab import Lab, LabUnavailable

HERE = Path(__file__).parent
WORKERS = 4
SPEEDS = (100, 300, 1000, 0)  # Mbit/s; 0: loopback's own speed
LIVE = ("low_rank", 100)  # the cell that is run end to end
LOOKS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        out = Path(folder) if asked.small else asked.out
        try:
            for task in asked.task:
                _measure(Cells(out / task, _settings(asked, task), asked.cells), task, asked)
        except Enough:
            print(f"lossy: {asked.cells} cells made; run it again for the others")
            return 0
        text = page(out, {task: TASKS[task] for task in asked.task})
    print(text)
    if not asked.small:
        (out.parent / "figures.md").write_text(text)
    return 0


def _settings(asked: argparse.Namespace, task: str) -> dict[str, Any]:
    return {"steps": asked.steps, "rounds": asked.rounds, "data": _data(asked, task), "small": asked.small}


def _measure(cells: Cells, task: str, asked: argparse.Namespace) -> None:
    steps, seeds = (6, 1) if asked.small else (asked.steps, 3)
    looks = sorted({round(steps * k / LOOKS) for k in range(LOOKS + 1)})
    speeds = asked.mbit or ((30,) if asked.small else SPEEDS)
    workload = TASKS[task].workload(asked.small, _data(asked, task))
    for mbit in speeds:
        cells.once(f"seconds_{mbit:g}", _seconds(asked, task, mbit))
    for seed in range(seeds):
        for name in OURS:
            cells.once(
                f"trajectory_{name}_seed{seed}",
                lambda: trajectory(name, TASKS[task], workload, seed, looks, WORKERS)._asdict(),  # noqa: B023
            )
        for name in dict.fromkeys(same_training(one) for one in PEERS):
            if name != EXACT:
                cells.once(f"trajectory_{name}_seed{seed}", _live(asked, task, name, seed, looks, 0))
    end = min(TASKS[task].end, 8) if asked.small else TASKS[task].end
    for seed in range(seeds):
        for name in TO_THE_END if end else ():
            make = functools.partial(to_the_end, name, TASKS[task], workload, seed, end, WORKERS)
            cells.once(f"end_{name}_seed{seed}", lambda: make()._asdict())  # noqa: B023
    live, speed = LIVE[0], LIVE[1] if LIVE[1] in speeds else speeds[0]
    cells.once(f"live_{live}_{speed:g}", _live(asked, task, live, 0, looks, speed))


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
    more = [*(["--small"] if asked.small else []), *(["--data", data] if (data := _data(asked, task)) else [])]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lossy.job", "--task", task, "--mbit", str(mbit)]
    with TemporaryDirectory() as folder, Lab(WORKERS, mbit) as lab:
        out = Path(folder) / "found.json"
        lab.run([*command, *words, *more, "--out", str(out)], timeout_seconds=3600, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
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
    parser.add_argument("--steps", type=int, default=1000, help="of a trajectory")
    parser.add_argument("--rounds", type=int, default=4, help="of timing")
    parser.add_argument("--cells", type=int, default=0, help="to make at most, then stop; 0: all")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where cells are kept, figures.md beside it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except LabUnavailable as reason:
        raise SystemExit(f"no network lab here: {reason}") from None
