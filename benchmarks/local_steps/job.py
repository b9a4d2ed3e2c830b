"""What each of the four hosts runs: contenders by turns, timed; or one of ours trained from the start, live.

A turn is some steps, as many as make whole rounds from meeting to meeting; its seconds are the slowest host's.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import armillary
from benchmarks.local_steps.training import SPLITS, accuracy, batch_of, loss, made
from benchmarks.netlab import counted_bytes

WARM_STEPS = 3
Step = Callable[[Any], object]


def main() -> None:
    asked = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = _live(asked) if asked.live else _timed(asked)
    if dist.get_rank() == 0:
        asked.out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _built(name: str, period: int, is_small: bool) -> Step:
    """One training step on a batch, by that contender."""
    model, optimizer = made(is_small, 0)
    if name == "ours":
        _ours(model, optimizer, period, is_small)
        return partial(_step, model, optimizer)
    # PowerSGD in one bucket: its hook asks for sums as others end, and over gloo two buckets may pair them wrongly.
    one_bucket = {"bucket_cap_mb": 1000} if name == "PowerSGD" else {}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **one_bucket)
    if name == "PowerSGD":
        wrapped.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=10), powerSGD_hook)
    if name == "PostLocalSGD":
        alone, _ = dist.new_subgroups(1)
        state = PostLocalSGDState(None, alone, start_localSGD_iter=0, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period, warmup_steps=0))
    return partial(_step, wrapped, optimizer)


def _ours(model: Any, optimizer: Any, period: int, is_small: bool) -> armillary.Run:
    few = [batch_of(is_small, SPLITS[0], 0, 0, rank) for rank in range(dist.get_world_size())]
    wished = {"*": f"local_steps(steps={period})"}
    return armillary.parallelize(model, optimizer, few, loss, constraints=wished)


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def _timed(asked: argparse.Namespace) -> dict[str, Any]:
    running = {name: _built(name, asked.period, asked.small) for name in asked.contenders}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for step in running.values():
        for number in range(WARM_STEPS):
            step(batch_of(asked.small, SPLITS[0], 1, number, dist.get_rank()))
    for number in range(asked.rounds):
        for name in asked.contenders if number % 2 == 0 else asked.contenders[::-1]:
            turns[name].append(_turn(running[name], asked, number))
    return {"turns": turns, "steps": asked.steps, "period": asked.period}


def _turn(step: Step, asked: argparse.Namespace, number: int) -> dict[str, float]:
    batches = [batch_of(asked.small, SPLITS[0], 2 + number, at, dist.get_rank()) for at in range(asked.steps)]
    dist.barrier()
    counted, begun = counted_bytes(), time.perf_counter()
    for batch in batches:
        step(batch)
    mine = [time.perf_counter() - begun, (counted_bytes() - counted).sent_bytes]
    told = torch.tensor(mine, dtype=torch.float64) / asked.steps
    everyones = [torch.zeros_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, told)
    table = torch.stack(everyones)
    return {"step_seconds": float(table[:, 0].max()), "sent_bytes": float(table[:, 1].mean())}


def _live(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of all steps, and the accuracy then."""
    model, optimizer = made(asked.small, 0)
    run = _ours(model, optimizer, asked.period, asked.small)
    dist.barrier()
    begun = time.perf_counter()
    for number in range(asked.steps):
        _step(model, optimizer, batch_of(asked.small, SPLITS[0], 0, number, dist.get_rank()))
    mine = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    run.close()
    return {"steps": asked.steps, "seconds": float(mine), "accuracy": accuracy(model, asked.small)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=[])
    parser.add_argument("--period", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
