"""What every rank runs: one mode, how long its steps took, what crossed its link, and what memory it took.

Layers wait instead of computing, as if every worker had a processor of its own; weights, gradients and what is sent are
real. Memory is the process's PSS at its peak over the timed steps, beside what it had before it built the model.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import armillary
from benchmarks.cyclic_ring.modes import Waiting
from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory
from benchmarks.measuring.record import machine
from benchmarks.netlab import counted_bytes

LAYERS, WIDTH = 16, 800  # 41 MB of weights; a stage and an FSDP2 unit is a layer
WARM_STEPS = 2

Batch = tuple[Tensor, Tensor]
Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, help="of ours; without it FSDP2")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--waiting-seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = None if options.plan is None else armillary.Plan.load(options.plan)
    return_freed_memory()
    bare = pss_bytes()
    model, batch = waiting_model(options.waiting_seconds), batch_of(dist.get_rank())
    step, end = _fsdp2(model, batch) if plan is None else _ours(plan, model, batch)
    for _ in range(WARM_STEPS):
        step()
    return_freed_memory()
    level, counted, begun = begin_watch(), counted_bytes(), time.perf_counter()
    for _ in range(options.steps):
        step()
    mine = {
        "step_seconds": (time.perf_counter() - begun) / options.steps,
        "sent_bytes": (counted_bytes() - counted).sent_bytes / options.steps,
        "peak_bytes": peak_bytes(level) - bare,
    }
    end()
    everyones: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    if dist.get_rank() == 0:
        weights = LAYERS * (WIDTH + 1) * WIDTH * 4
        options.out.write_text(json.dumps({"machine": machine(), "weight_bytes": weights, "ranks": everyones}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def waiting_model(waiting_seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Waiting(waiting_seconds / LAYERS, WIDTH) for _ in range(LAYERS)))


def batch_of(rank: int) -> Batch:
    samples = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(rank))
    return samples[0], samples[1]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _fsdp2(model: nn.Sequential, batch: Batch) -> tuple[Step, Callable[[], object]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return partial(_step, model, momentum(model), batch), dist.barrier


def _ours(plan: armillary.Plan, model: nn.Module, batch: Batch) -> tuple[Step, Callable[[], object]]:
    run = armillary.attach(plan, model, momentum(model), loss=loss_of, example=batch)
    return partial(run.step, [batch]), partial(run.close, gather=False)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """The user's plain loop, once."""
    loss = loss_of(model, (batch[0].clone().requires_grad_(), batch[1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    main()
