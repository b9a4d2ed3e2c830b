"""What every rank runs: both ways are set up as well as this job allows, then they train by turns to the goal.

Ours decides as `armillary train --autotune 3` does among plans that do not prefetch, and the one carried out gets
prefetch, too; DDP gets the fastest of a few sizes of its buckets.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from armillary import Plan, Topology, auto_plan
from armillary.planning.prefetch import prefetching
from armillary.session.workload import Workload
from benchmarks.measuring.record import machine
from benchmarks.measuring.workloads import find, first_batches
from benchmarks.parallax.judge import Links, judge
from benchmarks.parallax.race import Race, save
from benchmarks.parallax.sides import ddp_sparse, ours, start
from benchmarks.parallax.tasks import TASKS, Task
from benchmarks.parallax.turns import by_turns, rotated, timed

TRIALS = 3  # of the best plans, in the job, before step 0
BUCKETS_MIB = (25.0, 2.0, 1.0)  # 25 is DDP's default; smaller ones begin to travel earlier
WARM_STEPS, TIMED_STEPS, ROUNDS = 2, 3, 4  # of each size of buckets, as many as of each plan on trial


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if options.float64 else torch.float32)
    dist.init_process_group("gloo")
    task = TASKS[options.task]
    workload = find(options.task, task.options)
    plans, topology = _plans(workload, task)
    buckets = _bucket_seconds(workload, task)
    best = min(buckets, key=buckets.__getitem__)
    sides = {"ddp_sparse": ddp_sparse(workload, task, best)}
    sides |= {name: ours(workload, task, plan, topology) for name, plan in plans.items()}
    links, plain, load = Links(options.mbit, options.folder), start(workload), os.getloadavg()[0]

    def judged(turn: int) -> Mapping[str, Mapping[str, float]]:
        with links.opened(turn):
            return judge(sides, workload, plain, task.held_out_batches)

    steps = options.turn_steps or task.turn_steps
    curves = by_turns(sides, task.goal, (options.steps or task.steps) // steps, steps, judged)
    if dist.get_rank() == 0:
        groups = plans["planned"].groups
        conditions = {
            "task": options.task, "precision": "float64" if options.float64 else "float32",
            "workload": dict(task.options), "workers": dist.get_world_size(),
            "Mbit/s": options.mbit, "optimizer": f"Adagrad, rate {task.rate:g}, accumulator {task.accumulator:g}",
            "parameters": {name: list(value.shape) for name, value in plain.named_parameters()},
            "plan": {name: group.exchange.name for group in groups for name in group.parameters},
            "notes": list(plans["planned"].notes), "bucket MiB": best, "seconds by bucket MiB": buckets,
            "load before": load, "machine": machine(),
        }  # fmt: skip
        save(Race(conditions, task.goal, task.beside, curves), options.out)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a dozen process groups of several plans: they need not be taken down one by one


def _plans(workload: Workload, task: Task) -> tuple[dict[str, Plan], Topology]:
    """What would be carried out without prefetch, and the same with it where it has tables that can prefetch; and
    the links as they were measured."""
    model = start(workload)
    optimizer = task.optimizer(model.parameters())

    few = first_batches(workload, dist.get_world_size())
    decided = auto_plan(model, optimizer, few, workload.loss, autotune=TRIALS)
    ahead = prefetching(decided.plan, decided.profile, decided.topology)
    found = {"planned": decided.plan, "planned_ahead": ahead}
    return found if ahead != decided.plan else {"planned": decided.plan}, decided.topology


def _bucket_seconds(workload: Workload, task: Task) -> dict[float, float]:
    """Median seconds a step of DDP by the size of its buckets; the same on every rank. The models are dropped."""
    sides = {mib: ddp_sparse(workload, task, mib) for mib in BUCKETS_MIB}
    found: dict[float, list[float]] = {mib: [] for mib in sides}
    for side in sides.values():
        timed(side, WARM_STEPS)
    for index in range(ROUNDS):
        for mib in rotated(list(sides), index):
            found[mib].append(timed(sides[mib], TIMED_STEPS).seconds / TIMED_STEPS)
    return {mib: statistics.median(seconds) for mib, seconds in found.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--turn-steps", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
