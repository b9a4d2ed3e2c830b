"""Seconds a training step of every rule takes on a shaped link: python -m benchmarks.cyclic_accuracy.clock

Root and iproute2: the network lab. Four workers, each of which waits instead of computing, so long as this machine's
core computed the stage, times SLOWER: waiting has a cost of its own, and steps of some ten milliseconds would drown in
it. The link is the one on which an all-reduce of the gradients alone takes as long as the compute.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cyclic_accuracy.clock_job import Sizes
from benchmarks.cyclic_accuracy.rules import WORKERS, Costs
from benchmarks.cyclic_accuracy.tasks import TASKS, Task
from benchmarks.measuring.record import machine
from benchmarks.netlab.lab import Lab

__all__ = ["link_mbit"]

RESULTS = Path(__file__).parent / "results"
SLOWER = 20
TRIES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, task in TASKS.items():
        sizes = [(count, forward * SLOWER, backward * SLOWER) for count, forward, backward in stage_seconds(task)]
        mbit = link_mbit(4 * sum(count for count, _, _ in sizes), sum(f + b for _, f, b in sizes))
        load = os.getloadavg()[0]
        turns = _turns(sizes, task.make().costs, mbit, options)
        conditions = {
            "machine": machine(), "workers": WORKERS, "Mbit/s": mbit, "slower": SLOWER, "rounds": options.rounds,
            "timed steps a turn": options.steps, "load before": load, "stages": sizes,
        }  # fmt: skip
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"clock_{name}.json").write_text(json.dumps({"conditions": conditions, "turns": turns}) + "\n")
        for mode in dict.fromkeys(turn["mode"] for turn in turns):
            print(name, mode, [round(t["step_seconds"] * 1e3) for t in turns if t["mode"] == mode], "ms", flush=True)


def link_mbit(gradient_bytes: float, compute_seconds: float) -> float:
    """Mbit/s at which a ring all-reduce among WORKERS takes as long as the compute; three digits."""
    sent_bits = 8 * gradient_bytes * 2 * (WORKERS - 1) / WORKERS
    return float(f"{sent_bits / compute_seconds / 1e6:.3g}")


def stage_seconds(task: Task) -> Sizes:
    """Per stage of the task: parameters, seconds of one micro-batch forward and backward; medians of processor time."""
    torch.manual_seed(0)
    parts = task.make()
    value, target = next(task.micro_batches(0))[0]
    seconds: list[list[tuple[float, float]]] = [[] for _ in parts.stages]
    for _ in range(TRIES):
        trail = []
        passed = value
        for stage in parts.stages:
            passed = _cut_off(passed)
            begun, entered = time.process_time(), passed
            passed = stage(passed)
            if stage is parts.stages[-1]:
                passed = parts.loss(passed, target)
            trail.append((entered, passed, time.process_time() - begun))
        gradient = None
        for place in reversed(range(len(trail))):
            entered, left, forward = trail[place]
            sources = [
                *parts.stages[place].parameters(),
                *([_tensor(entered)] if _tensor(entered).requires_grad else []),
            ]
            begun = time.process_time()
            gradient = torch.autograd.grad(_tensor(left), sources, gradient)[-1]
            seconds[place].append((forward, time.process_time() - begun))
    counts = [sum(p.numel() for p in stage.parameters()) for stage in parts.stages]
    middle = [[statistics.median(both) for both in zip(*tries)] for tries in seconds]
    return [(count, forward, backward) for count, (forward, backward) in zip(counts, middle)]


def _tensor(value: Any) -> torch.Tensor:
    """What is computed on, of a value that other tensors travel with."""
    found: torch.Tensor = value[0] if isinstance(value, tuple) else value
    return found


def _cut_off(value: Any) -> Any:
    first = _tensor(value).detach()
    first = first.requires_grad_(first.is_floating_point())
    return (first, *value[1:]) if isinstance(value, tuple) else first


def _turns(sizes: Sizes, costs: Costs, mbit: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The `costs` are those of the training runs, so that what is fresh is the same here and there."""
    with tempfile.TemporaryDirectory() as folder, Lab(WORKERS, mbit) as lab:
        out = Path(folder) / "turns.json"
        words = [
            "--sizes",
            json.dumps(sizes),
            "--costs",
            json.dumps(costs),
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
        ]
        module = "benchmarks.cyclic_accuracy.clock_job"
        lab.run(
            [sys.executable, "-W", "ignore", "-m", module, *words, "--out", str(out)], timeout_seconds=300, pin=True
        )
        found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
