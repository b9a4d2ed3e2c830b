"""How many files of the library a path enters: python -m benchmarks.revisions.files OLDER [--newer REVISION]

Every call on rank 0 of two processes is watched, and counted by the file it enters. Prints a Markdown table; nothing is
timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import armillary
from benchmarks.revisions.source import unpack

WARM_STEPS = 3
MOVING_STEPS = 4  # behind them the one line has moved to its plan
RANK = "import sys; from benchmarks.revisions.files import rank; rank(int(sys.argv[1]), sys.argv[2])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older")
    parser.add_argument("--newer", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        older, newer = (_counted(unpack(one, Path(folder)), Path(folder)) for one in (options.older, options.newer))
    print("| path on rank 0 | files before | files now | ratio |\n| --- | ---: | ---: | ---: |")
    for path, before in older.items():
        print(f"| {path} | {before} | {newer[path]} | {newer[path] / before:.2f} |")


def _counted(source: Path, folder: Path) -> Mapping[str, int]:
    """By path, in a job of two processes on this source."""
    told = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{os.getcwd()}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    store = tempfile.mktemp(dir=folder)
    ranks = [subprocess.Popen([*command, one, store], env=told, stdout=subprocess.PIPE) for one in "01"]
    printed = [one.communicate(timeout=300)[0] for one in ranks]
    found: dict[str, int] = json.loads(printed[0].splitlines()[-1])
    return found


def rank(number: int, store: str) -> None:
    """What each process of the job does; each prints its counts last."""
    dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2)
    torch.manual_seed(0)
    batches = [(torch.randint(0, 512, (8, 4)), torch.randint(0, 8, (8,))) for _ in range(8)]

    def trained() -> tuple[nn.Module, SGD, Callable[[], None]]:
        model = nn.Sequential(nn.Embedding(512, 16), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        optimizer = SGD(model.parameters(), 0.1)

        def step() -> None:
            optimizer.zero_grad()
            _loss(model, batches[0]).backward()
            optimizer.step()

        return model, optimizer, step

    def of_a_step(constraints: Mapping[str, str], schedule: str = "simultaneous", micro_batches: int = 0) -> int:
        model, optimizer, step = trained()
        run = armillary.parallelize(model, optimizer, batches, _loss, constraints=constraints, schedule=schedule)
        taken = (lambda: run.step(batches[:micro_batches])) if micro_batches else step
        for _ in range(WARM_STEPS):
            taken()
        with _entered() as files:
            taken()
        run.close()
        return len(files)

    model, optimizer, _ = trained()
    plan = armillary.auto_plan(model, optimizer, batches, _loss).plan
    with _entered() as attaching:
        run = armillary.attach(plan, model, optimizer)
    run.close()
    model, optimizer, step = trained()
    with _entered() as moving:
        run = armillary.parallelize(model, optimizer)
        for _ in range(MOVING_STEPS):
            step()
    run.close()
    counts = {
        "`attach`": len(attaching),
        "the one line, to its move": len(moving),
        "a step with dense gradients": of_a_step({"*": "all_reduce"}),
        "a step with a table by row": of_a_step({"0.weight": "owned_rows"}),
        "a step of four micro-batches in 1F1B": of_a_step({}, "one_f_one_b(micro_batches=4)", 4),
    }
    dist.destroy_process_group()
    print(json.dumps(counts))


@contextmanager
def _entered() -> Iterator[set[str]]:
    """The files of the library that are entered inside."""
    root, found = str(Path(armillary.__file__).parent), set[str]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename)

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    main()
