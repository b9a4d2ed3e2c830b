"""What every rank runs: plans of one workload by turns in one job."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from armillary import auto_plan
from armillary.transport.transport import Transport
from benchmarks.measuring.measure import Rounds, all_alive, interleave, rehearse
from benchmarks.measuring.record import Record, machine, save
from benchmarks.measuring.workloads import find, first_batches, start
from benchmarks.parallax import constructed
from benchmarks.parallax.modes import double, plans
from benchmarks.parallax.tables import RIVALS
from benchmarks.planner.cells import WORKLOADS
from benchmarks.planner.trained import trained

DRAWN = 4  # batches of a rank, again and again


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.length:
        workload: Any = constructed.workload(length=options.length)
    else:
        workload = find(options.workload, WORKLOADS[options.workload])
    rank, workers = dist.get_rank(), dist.get_world_size()
    model, optimizer = start(workload)
    few = first_batches(workload, workers)
    decided = auto_plan(model, optimizer, few, workload.loss, autotune=options.autotune)
    known = plans(decided.profile, decided.topology, decided.plan, optimizer)
    batches = first_batches(workload, workers, DRAWN)[rank::workers]
    names = [name for name in options.modes.split(",") if name in known]
    packings = {name: known[name].workers_per_node for name in names}
    shared = {
        count: Transport(count, turn_bytes=decided.topology.turn_bytes) for count in dict.fromkeys(packings.values())
    }
    factories = {name: partial(trained, workload, known[name], batches, shared[packings[name]]) for name in names}
    rehearse({names[0]: factories[names[0]]})
    rounds = Rounds(options.rounds, 1, options.steps)
    blocks = interleave(factories, rounds, all_alive(factories))
    if rank == 0:
        conditions: dict[str, str | int | float] = {
            "workload": workload.name, "workers": workers, "Mbit/s": options.mbit, "rounds": rounds.rounds,
            "timed steps": rounds.timed_steps, "unit": workload.unit,
            "samples": sum(map(workload.samples, batches)) / len(batches), "alpha": round(decided.profile.alpha, 3),
            "planned": ", ".join(f"{group.name} by {group.exchange}" for group in decided.plan.groups),
            "planned is": double(known, "planned", RIVALS), "machine": machine(),
        }  # fmt: skip
        save(Record(conditions, blocks), Path(options.out))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups need not be taken down one by one


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="")
    parser.add_argument("--length", type=int, default=0, help="of the constructed model, which is taken then")
    parser.add_argument("--modes", required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--autotune", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
