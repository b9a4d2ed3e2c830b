"""The pipelines compared: torch's own flush schedules, the same ones on our runtime, and the cyclic one.

Each is two functions: `step()` hands in one training step, `settle()` finishes what is in flight. All begin with the
same weights, see the same micro-batches and step plain SGD with the mean gradient, so that only the schedule differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from armillary.schedules import Schedule
from armillary.schedules.cyclic import cyclic_pipeline
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.requests import Channel

STAGES, BLOCKS, WIDTH, SAMPLES = 2, 4, 768, 64  # blocks a stage; samples a micro-batch
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Contender:
    """A pipeline that trains. `weights` is this process's stage."""

    step: Callable[[], Any]
    settle: Callable[[], Any]
    weights: Callable[[], list[Tensor]]


def contenders(rank: int, micro_batches: int, channel: Channel) -> Mapping[str, Callable[[], Contender]]:
    """By name, each ready to be built; "flush" in the name of those that cyclic is compared with."""
    ours = {
        "our GPipe, flush": gpipe(STAGES, micro_batches),
        "our 1F1B, flush": one_f_one_b(STAGES, micro_batches),
        "cyclic": cyclic_pipeline(STAGES, micro_batches),
        "cyclic, one step old (2BW)": cyclic_pipeline(STAGES, micro_batches, slack=micro_batches),
    }
    return {
        "torch GPipe, flush": partial(of_torch, rank, micro_batches, ScheduleGPipe),
        "torch 1F1B, flush": partial(of_torch, rank, micro_batches, Schedule1F1B),
        **{name: partial(_of_ours, rank, schedule, channel) for name, schedule in ours.items()},
    }


def stage_of(rank: int) -> nn.Sequential:
    """Multi-layer perceptrons one after the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        blocks = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
        return nn.Sequential(*[nn.Sequential(*block) for block in blocks])


def data(micro_batches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, (micro_batches x SAMPLES, WIDTH); the same every step."""
    stream = torch.Generator().manual_seed(7)
    whole = torch.randn(2, micro_batches * SAMPLES, WIDTH, generator=stream)
    return whole[0], whole[1]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def of_torch(rank: int, micro_batches: int, kind: type[Any]) -> Contender:
    module, (inputs, targets) = stage_of(rank), data(micro_batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    shown = torch.randn(SAMPLES, WIDTH, requires_grad=rank > 0), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"), input_args=(shown[0],), output_args=(shown[1],))
    schedule = kind(stage, micro_batches, loss_fn=loss)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()

    return Contender(step, lambda: None, lambda: [p.detach() for p in module.parameters()])


def _of_ours(rank: int, schedule: Schedule, channel: Channel) -> Contender:
    module, (inputs, targets) = stage_of(rank), data(schedule.micro_batches)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    stages = [Stage(j, nn.Identity(), {}) for j in range(schedule.stages)]
    stages[rank] = Stage(rank, module, {name: name for name, _ in module.named_parameters()})
    pipeline = Interpreter(stages, optimizer, TrainSpec(schedule, loss), in_a_row(schedule, rank, channel))
    batches = list(zip(inputs.split(SAMPLES), targets.split(SAMPLES)))
    return Contender(
        partial(pipeline.step, batches), pipeline.settle, lambda: [p.detach() for p in module.parameters()]
    )
