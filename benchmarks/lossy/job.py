"""What every rank runs: contenders by turns, timed in paired rounds; or one contender trained, live.

A turn is warm steps, untimed, and timed steps; its seconds are the slowest rank's. All contenders of a round run one
after another, another one first in every round, so that a drift of the machine meets all of them. Every round has
batches of its own, as in training. A contender whose code is not settled at the start trains until it is, untimed.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import armillary
from armillary.session.workload import TrainBatches
from benchmarks.lossy.contenders import SETTLED_AFTER, Contender, built
from benchmarks.lossy.judged import held_out, judged
from benchmarks.lossy.tasks import TASKS
from benchmarks.measuring.record import machine
from benchmarks.measuring.workloads import first_batches, start
from benchmarks.netlab import counted_bytes

WARM_STEPS = 3


def main() -> None:
    asked = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = TASKS[asked.task].workload(asked.small, asked.data)
    few = first_batches(workload, dist.get_world_size(), seed=asked.seed)
    decided = armillary.auto_plan(*start(workload, asked.seed), few, workload.loss)
    found = _trained(asked, workload, decided) if asked.looks else _timed(asked, workload, decided)
    found |= {"machine": machine(), "task": asked.task, "workers": dist.get_world_size(), "mbit": asked.mbit}
    found |= {"notes": decided.plan.notes}
    if dist.get_rank() == 0:
        asked.out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _timed(asked: argparse.Namespace, workload: Any, decided: Any) -> dict[str, Any]:
    feed = TrainBatches(workload, (dist.get_rank(), dist.get_world_size()), asked.seed)
    before = list(islice(feed, 2 if asked.small else max(SETTLED_AFTER.values())))
    running = {name: built(name, TASKS[asked.task], workload, asked.seed, decided) for name in asked.contenders}
    for name in filter(SETTLED_AFTER.__contains__, running):
        for batch in before[-SETTLED_AFTER[name] :]:
            running[name].step(batch)
    turns = []
    for number in range(-1, asked.rounds):  # the first is not kept: it opens connections
        names, batches = list(running), list(islice(feed, WARM_STEPS + asked.steps))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = _turn(running[name], batches)
            if number >= 0:
                turns.append({"mode": name, "round": number, **turn})
    for one in running.values():
        one.close()
    return {"turns": turns, "steps": asked.steps, "rounds": asked.rounds}


def _turn(contender: Contender, batches: list[Any]) -> dict[str, float]:
    dist.barrier()
    for batch in batches[:WARM_STEPS]:
        contender.step(batch)
    counted, begun = counted_bytes(), time.perf_counter()
    for batch in batches[WARM_STEPS:]:
        contender.step(batch)
    seconds, crossed = time.perf_counter() - begun, counted_bytes() - counted
    steps = len(batches) - WARM_STEPS
    mine = torch.tensor([seconds / steps, crossed.sent_bytes / steps], dtype=torch.float64)
    everyones = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    table = torch.stack(everyones)
    return {"step_seconds": float(table[:, 0].max()), "sent_bytes": float(table[:, 1].mean())}


def _trained(asked: argparse.Namespace, workload: Any, decided: Any) -> dict[str, Any]:
    """The metric after so many steps, and the seconds that training took until then, looks left out."""
    task = TASKS[asked.task]
    contender = built(asked.contenders[0], task, workload, asked.seed, decided)
    feed = TrainBatches(workload, (dist.get_rank(), dist.get_world_size()), asked.seed)
    batches, metric, seconds, spent = held_out(workload), list[float](), list[float](), 0.0
    for step in range(max(asked.looks) + 1):
        if step in asked.looks:
            metric.append(judged(workload, contender.model, batches, task.metric))
            seconds.append(spent)
            dist.barrier()
        if step < max(asked.looks):
            begun = time.perf_counter()
            contender.step(next(feed))
            spent += time.perf_counter() - begun
    contender.close()
    return {"contender": asked.contenders[0], "steps": sorted(asked.looks), "metric": metric, "seconds": seconds}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--contenders", type=lambda text: text.split(","), required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--data", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--looks", type=lambda text: [int(one) for one in text.split(",")], default=[])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
