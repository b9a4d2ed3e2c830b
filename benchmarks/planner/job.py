"""What every rank of a cell runs: it decides as `armillary train` does, then carries out every contender by turns."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from armillary import Plan, assumptions_of, auto_plan
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.session.autotune import CHOSEN, by_simulation
from armillary.transport.transport import Transport
from benchmarks.measuring.measure import Lend, Rounds, all_alive, interleave, rehearse
from benchmarks.measuring.record import machine
from benchmarks.measuring.workloads import find, first_batches, start
from benchmarks.planner.cells import WORKLOADS
from benchmarks.planner.contenders import AGAIN, contenders
from benchmarks.planner.trained import trained
from benchmarks.planner.turns import ALONE, by_turns

DRAWN = 6  # batches of a rank, again and again
TRIALS = 8  # of the best plans, in the job, before step 0; those far behind after a few steps are timed no more


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = find(options.workload, WORKLOADS[options.workload])
    rank, workers = dist.get_rank(), dist.get_world_size()
    model, optimizer = start(workload)
    few = first_batches(workload, workers)
    began = time.perf_counter()
    decided = auto_plan(model, optimizer, few, workload.loss, autotune=TRIALS)
    deciding_seconds = time.perf_counter() - began
    assumptions = assumptions_of(optimizer)
    plans = contenders(decided.profile, decided.topology, assumptions)
    batches = first_batches(workload, workers, DRAWN)[rank::workers]
    shared = Transport(decided.plan.workers_per_node, turn_bytes=decided.topology.turn_bytes)
    factories = {name: partial(trained, workload, plan, batches, shared) for name, plan in plans.items()}
    factories[ALONE] = partial(trained, workload, None, batches, shared)
    rehearse({CHOSEN: factories[CHOSEN]}, DRAWN)  # on every batch: a kernel for a new shape is no plan's memory
    lend = all_alive(factories)
    first = interleave(factories, Rounds(1, 2, 3), lend)
    seconds = {block.mode: block.wall_seconds for block in first}
    frozen = _name_of(decided.plan, plans)
    turns = by_turns(lend, seconds, {CHOSEN, AGAIN, ALONE, frozen}, options.seconds)
    held = {name: _fullest(lend, name) for name in plans}
    if rank == 0:
        case = Case(decided.profile, decided.topology, assumptions)
        found = {
            "conditions": {"workload": options.workload, "workers": workers, "machine": machine()}
            | {"ranks_per_host": decided.plan.workers_per_node},
            "forecast": {name: _forecast(plan, case) for name, plan in plans.items()},
            "simulated_order": by_simulation({n: p for n, p in plans.items() if n in _priced(plans)}, case),
            "frozen": frozen,
            "note": decided.plan.notes[-1] if decided.plan.notes else "",
            "first": [asdict(block) for block in first],
            "turns": turns,
            "held_bytes": held,
            "compute_seconds": decided.plan.compute_seconds,
            "deciding_seconds": deciding_seconds,
            "topology": json.loads(decided.topology.to_json()),
            "profile": json.loads(decided.profile.to_json()),
            "assumptions": asdict(assumptions),
            "samples": sum(map(workload.samples, batches)) / len(batches),
            "unit": workload.unit,
        }
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # process groups need not be taken down one by one


def _priced(plans: Mapping[str, Plan]) -> list[str]:
    """The planner's own candidates."""
    return [name for name in plans if name not in (AGAIN, "owned_dense")]


def _name_of(frozen: Plan, plans: Mapping[str, Plan]) -> str:
    return next(name for name, plan in plans.items() if plan.groups == frozen.groups)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _fullest(lend: Lend, name: str) -> int:
    """Memory of a plan between steps on the rank that has most, by PSS."""
    with lend(name) as built:
        held = torch.tensor(built.held_bytes)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


def _forecast(plan: Plan, case: Case) -> dict[str, Any]:
    played = simulate(plan, case)
    return {
        "sent_bytes": sum(played.sent_bytes.values()),
        "memory_bytes": plan.forecast.memory_bytes,
        "seconds": played.step_seconds,
        "unhidden_seconds": plan.forecast.seconds,
        "processor_seconds": played.processor_seconds,
        "exposed_seconds": played.exposed_seconds,
    }


if __name__ == "__main__":
    main()
