"""One rank of one cell: trains the recommender on batches dealt or shared out, and leaves how fast, and how well.

    torchrun --nproc-per-node 4 -m benchmarks.asynchronous.job --way "bound=4" --delays lot --batches 800 --out FILE

A rank computes and then sleeps, as ranks here share two processors: what it sleeps stands for compute of its own.
"""

import argparse
import json
import os
import random
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import armillary
from armillary.workloads.recommender import Recommender, workload
from benchmarks.measuring.record import machine

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
SECONDS, TIMES, SHARE = 0.02, 3, 4  # of a step's pause; slow: so many times; by lot: one step in so many
WAYS = {
    "all_reduce": {"constraints": {"*": "all_reduce"}},
    "owned rows": {"rule": "parallax"},
    "bound=0": {"schedule": "asynchronous(bound=0)"},
    "bound=4": {"schedule": "asynchronous(bound=4)"},
    "bound=None": {"schedule": "asynchronous(bound=None)"},
}
SAID = ("it can only lose", "it is expected to bring")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--delays", choices=("equal", "slow", "lot"), required=True)
    parser.add_argument("--batches", type=int, required=True, help="of all ranks together")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = trained(asked.way, asked.delays, asked.batches, chosen(asked.small))
    if RANK == 0:
        asked.out.write_text(json.dumps({**found, "machine": machine()}))


def chosen(is_small: bool) -> Recommender:
    small: dict[str, Any] = {"data": "latent_factors", "rows": 200, "width": 4, "hidden": 8, "batch_size": 8}
    return workload(**small) if is_small else workload(data="latent_factors", rows=200_000)


def trained(way: str, delays: str, batches: int, task: Recommender) -> dict[str, Any]:
    rank, steps = RANK, count()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            time.sleep(_pause(delays, rank, next(steps)))
        return task.loss(model, batch)

    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    drawn = list(islice(_endless(task), batches))
    with armillary.parallelize(model, optimizer, drawn[: 2 * RANKS], loss, **WAYS[way]) as run:
        steps = count()
        dist.barrier()
        began, mine = time.perf_counter(), 0
        for number in run.shard(range(batches)):
            run.step([drawn[number]])
            mine += 1
        dist.barrier()
        seconds = time.perf_counter() - began
        totals = run.evaluate(task.batches("held_out", rank, run.workers, 0), task.evaluate)
        notes = [note for note in run.plan.notes if any(said in note for said in SAID)]
        foreseen = run.plan.step_seconds
        report = str(run.report())
    everyones: list[Any] = [None] * RANKS
    dist.all_gather_object(everyones, mine)
    return {
        "samples_a_second": batches * task.batch_size / seconds,
        "foreseen": task.batch_size * RANKS / foreseen if foreseen else 0.0,
        "error": task.report(totals)["root_mean_squared_error"],
        "steps": everyones,
        "notes": notes,
        "report": report,
    }


def _pause(delays: str, rank: int, step: int) -> float:
    is_slow = {
        "equal": False,
        "slow": rank == RANKS - 1,
        "lot": random.Random(f"{rank} {step}").random() < 1 / SHARE,
    }[delays]
    return SECONDS * (TIMES if is_slow else 1)


def _endless(task: Recommender) -> Any:
    """The same on every rank."""
    for epoch in count():
        yield from task.batches("train", 0, 1, epoch)


if __name__ == "__main__":
    main()
