"""What every rank runs: contenders by turns, each one first in another round. A turn is warm steps, then timed ones.

A turn's seconds are the slowest rank's; bytes are rank 0's, as the kernel counted them. Warm steps of an edge that
remembers samples see what the timed ones see, so these are of samples met before.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import armillary
from benchmarks.edges.contenders import CODED, TORCH, UNCODED, Contender, built, planned
from benchmarks.edges.task import BIG, SMALL, Batch, loss, model_of, optimizer_of, steps_of
from benchmarks.measuring.record import machine
from benchmarks.netlab import counted_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--contenders", type=lambda text: text.split(";"), default=[*CODED, TORCH])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = SMALL if asked.small else BIG
    steps = list(islice(steps_of(sizes, seed=0), asked.steps))
    model = model_of(sizes, seed=0)
    decided = armillary.auto_plan(model, optimizer_of(model), steps[0], loss)
    seen, topology = decided.profile, decided.topology
    plans = {name: planned(UNCODED if name == TORCH else name, sizes, seen, topology) for name in asked.contenders}
    running = {name: built(name, sizes, plan, topology, steps[0][0]) for name, plan in plans.items()}
    turns = []
    for number in range(-1, asked.rounds):  # the first is not kept: it opens connections, and samples are new
        first = number % len(running)
        names = [*running]
        for name in names[first:] + names[:first]:
            turn = _turn(running[name], steps)
            if number >= 0:
                turns.append({"contender": name, "round": number, **turn})
    for one in running.values():
        one.close()
    if dist.get_rank() == 0:
        forecast = {name: plans[name].forecast.sent_bytes for name in plans}
        notes = {name: list(plan.notes) for name, plan in plans.items()}
        found = {"machine": machine(), "turns": turns, "forecast_bytes": forecast, "notes": notes}
        asked.out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _turn(contender: Contender, steps: list[list[Batch]]) -> dict[str, float]:
    dist.barrier()
    contender.step(steps[0])
    counted, begun = counted_bytes(), time.perf_counter()
    for micro_batches in steps:
        contender.step(micro_batches)
    dist.barrier()
    seconds = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    crossed = counted_bytes() - counted
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    each = {"sent_bytes": crossed.sent_bytes, "received_bytes": crossed.received_bytes}
    return {"step_seconds": float(seconds) / len(steps), **{what: n / len(steps) for what, n in each.items()}}


if __name__ == "__main__":
    main()
