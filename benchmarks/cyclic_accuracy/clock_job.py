"""What every rank runs: training steps of every mode by turns, with waiting instead of computing; see clock.py.

A stage is one vector as large as the stage's parameters, and waits as long as the stage computes. So the bytes on the
link and their order in time are the task's, while four workers share two cores.
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
from torch.nn.parallel import DistributedDataParallel

from armillary.exchanges import build_dense
from armillary.runtime.dense_unit import dense_unit
from armillary.schedules import Schedule
from armillary.schedules.cyclic import cyclic
from armillary.session.delayed_loop import OwnLoop
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import StageReplicas, TrainSpec, in_a_row
from armillary.transport.transport import Transport

WARM_STEPS = 3
BUCKET_MIB = {"ddp_25mb": 25.0, "ddp_small": 0.25}

Sizes = list[tuple[int, float, float]]  # per stage: parameters, seconds forward, seconds backward
Mode = tuple[Callable[[], object], Callable[[], object]]  # a step; what finishes what is on its way


class Waiting(nn.Module):
    def __init__(self, parameters: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, value: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(value, self.weight, self.seconds)
        return waited


class _Wait(torch.autograd.Function):
    """Passes its input on; the gradient of the weight is the weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds[0])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds[1])
        (weight,) = ctx.saved_tensors
        return gradients[0], weight.detach().clone(), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--costs", type=json.loads, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    sizes: Sizes = options.sizes
    running: dict[str, Mode] = {"compute": _alone(sizes)}
    running |= {name: _ddp(sizes, bucket) for name, bucket in BUCKET_MIB.items()}
    running["delayed"] = _delayed(sizes, transport)
    slacks = {"ring_v1": transport.place.workers, "ring_slack1": 1, "ring_slack0": 0}
    running |= {
        name: _ring(sizes, transport, cyclic(transport.place.workers, slack=slack, costs=options.costs))
        for name, slack in slacks.items()
    }
    turns = []
    for round_number in range(-1, options.rounds):  # the first is not kept: it opens connections
        for name, mode in running.items():
            seconds = _turn(mode, options.steps if round_number >= 0 else 1)
            if round_number >= 0:
                turns.append({"mode": name, "round": round_number, "step_seconds": seconds})
    if transport.place.rank == 0:
        options.out.write_text(json.dumps(turns) + "\n")
    transport.barrier()
    transport.close()


def _turn(mode: Mode, steps: int) -> float:
    """Seconds a step of the slowest rank, from the end of the last warm step on; then finishes what is on its way."""
    dist.barrier()
    for _ in range(WARM_STEPS):
        mode[0]()
    begun = time.perf_counter()
    for _ in range(steps):
        mode[0]()
    mine = torch.tensor((time.perf_counter() - begun) / steps, dtype=torch.float64)
    mode[1]()
    dist.barrier()
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def _model(sizes: Sizes) -> nn.Sequential:
    return nn.Sequential(*(Waiting(*size) for size in sizes))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _nothing() -> None:
    """Of modes that leave nothing on its way."""


def _alone(sizes: Sizes) -> Mode:
    model = _model(sizes)
    return partial(_step, model, _sgd(model)), _nothing


def _ddp(sizes: Sizes, bucket_mib: float) -> Mode:
    model = _model(sizes)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    return partial(_step, parallel, _sgd(model)), _nothing


def _delayed(sizes: Sizes, transport: Transport) -> Mode:
    model = _model(sizes)
    optimizer = _sgd(model)
    place, exchange = transport.place, build_dense("all_reduce")
    units = [
        dense_unit(f"stage {j}", {f"{j}.weight": model[j].weight}, exchange, place) for j in reversed(range(len(sizes)))
    ]
    run = OwnLoop(StageReplicas(place, transport, groups={0: units}).reducer(0, is_late=True), optimizer)
    return partial(_step, model, optimizer), run.settle


def _ring(sizes: Sizes, transport: Transport, schedule: Schedule) -> Mode:
    model = _model(sizes)
    optimizer = _sgd(model)
    stages = [Stage(j, stage, {"weight": f"{j}.weight"}) for j, stage in enumerate(model)]
    spec = TrainSpec(schedule, lambda output, _: output.sum())
    run = Interpreter(stages, optimizer, spec, in_a_row(schedule, transport.place.rank, transport))
    return partial(run.step, [(torch.zeros(1), None)]), run.settle


if __name__ == "__main__":
    main()
