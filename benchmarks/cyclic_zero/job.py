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

from armillary.runtime.cyclic.interpreter import Interpreter
from armillary.runtime.cyclic.seat import in_a_row
from armillary.runtime.cyclic.train_spec import TrainSpec
from armillary.runtime.partition.stages import chain, cut
from armillary.runtime.transport import Transport
from armillary.schedules.cyclic import cyclic
from benchmarks.cyclic_ring.modes import Waiting
from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory
from benchmarks.measuring.record import machine
from benchmarks.netlab import counted_bytes

LAYERS, WIDTH = 16, 800  # 41 MB of weights; a stage and an FSDP2 unit is a layer
WARM_STEPS = 2

Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("fsdp2", "zero_ring", "ring"), required=True)
    parser.add_argument("--slack", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--waiting-seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    return_freed_memory()
    bare = pss_bytes()
    step, settle = _made(options.mode, options.slack, options.waiting_seconds, transport)
    for _ in range(WARM_STEPS):
        step()
    return_freed_memory()
    level, counted, begun = begin_watch(), counted_bytes(), time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    seconds = (time.perf_counter() - begun) / options.steps
    mine = {
        "step_seconds": seconds,
        "sent_bytes": (counted_bytes() - counted).sent_bytes / options.steps,
        "peak_bytes": peak_bytes(level) - bare,
        "loss": float(loss),
    }
    settle()
    everyones: list[dict[str, Any]] = transport.share(mine)
    if transport.place.rank == 0:
        weights = LAYERS * (WIDTH + 1) * WIDTH * 4
        options.out.write_text(json.dumps({"machine": machine(), "weight_bytes": weights, "ranks": everyones}) + "\n")
    transport.barrier()
    transport.close()


def _made(mode: str, slack: int, waiting_seconds: float, transport: Transport) -> tuple[Step, Callable[[], object]]:
    """A training step of this worker, and what finishes everything on its way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Waiting(waiting_seconds / LAYERS, WIDTH) for _ in range(LAYERS)))
    stream = torch.Generator().manual_seed(transport.place.rank)
    batch = torch.randn(2, 1, WIDTH, generator=stream)
    if mode == "fsdp2":
        mesh = init_device_mesh("cpu", (transport.place.workers,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = _momentum(model)
        return partial(_step, model, optimizer, batch), dist.barrier
    optimizer = _momentum(model)
    stages = cut(model, chain(model), range(1, LAYERS))
    schedule = cyclic(transport.place.workers, slack=slack, costs=[(1, 2)] * LAYERS)
    spec = TrainSpec(schedule, _loss, lends=mode == "zero_ring")
    ring = Interpreter(stages, optimizer, spec, in_a_row(schedule, transport.place.rank, transport))
    return partial(_ring_step, ring, batch), ring.drain


def _ring_step(ring: Interpreter, batch: Tensor) -> Tensor:
    """The loss of this step or, on all ranks but the first, of the one before."""
    known = ring.step([(batch[0], batch[1])])
    return known[-1].losses[0] if known else torch.zeros(())


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """The user's plain loop, once."""
    loss = _loss(model(batch[0].clone().requires_grad_()), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    main()
