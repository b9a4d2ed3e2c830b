"""One of two processes: measures, plans every schedule from that, plays it, carries it out; rank 0 writes both seconds.

A block is: attach, steps that fill the schedule, timed steps, close. From the end of the last filling step to that of
the last timed one, on the slower process; so what is timed is the steady state, as the simulator shows it. Blocks go
round by turns, backwards every second time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import armillary
from benchmarks.measuring.record import machine
from benchmarks.measuring.workloads import find, first_batches, start

SCHEDULES = (
    "gpipe(micro_batches=4)", "one_f_one_b(micro_batches=4)", "pipeline(micro_batches=4)", "ring", "zero_ring",
)  # fmt: skip
FILLING = 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=json.loads, required=True, help="of the workload vision")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = find("vision", options.sizes)
    model, optimizer = start(workload)
    few = first_batches(workload, dist.get_world_size())
    decided = armillary.auto_plan(model, optimizer, few, workload.loss)
    facts, held = (decided.profile, decided.topology), armillary.assumptions_of(optimizer)
    plans = {
        text: armillary.plan(*facts, assumptions=held, schedule=armillary.Choice.parse(text)) for text in SCHEDULES
    }
    found: dict[str, list[float]] = {text: [] for text in SCHEDULES}
    for turn in range(options.rounds):
        for text in SCHEDULES if turn % 2 == 0 else SCHEDULES[::-1]:
            found[text].append(_block(workload, plans[text], options.steps))
    if dist.get_rank() == 0:
        rows = {
            text: {"played": _played(plans[text], *facts), "measured": statistics.median(seconds), "blocks": seconds}
            for text, seconds in found.items()
        }
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _played(made: armillary.Plan, profile: armillary.Profile, topology: armillary.Topology) -> float | None:
    """Seconds of a step; None of a schedule that the simulator refuses."""
    try:
        return armillary.simulate(made, profile, topology).step_seconds
    except ValueError:
        return None


def _block(workload: Any, made: armillary.Plan, steps: int) -> float:
    """Seconds of a step on the slower rank."""
    model, optimizer = start(workload)
    batches = first_batches(workload, 4, 1)
    with armillary.attach(made, model, optimizer, loss=workload.loss, example=batches[0]) as run:
        mine = [batches[number % len(batches)] for number in run._engine.micro_batches]
        for _ in range(FILLING):
            run.step(mine)
        began = time.perf_counter()
        for _ in range(steps):
            run.step(mine)
        seconds = (time.perf_counter() - began) / steps
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
