"""The three ways to train N stages on N micro-batches a step that are compared, on our own runtime.

replicas: model parallel x data parallel on N^2 processes: N replicas of the model, each cut over N processes, a
    micro-batch each. Within a replica one micro-batch goes up and comes down again (`gpipe` with one micro-batch: no
    overlap, nothing stale); then the processes of a stage average their gradients by one all-reduce, each stage as soon
    as its own backward is done, and step. Every process has its stage's weights and optimizer state.
shared: schedule `shared_stages` on N(N+1)/2 processes.
pipeline: schedule `pipeline` on N processes, N micro-batches.

A process makes its own stage only, so that no other stage is in its memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.plans import AllReduce, Message
from armillary.schedules import Schedule
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.gpipe import gpipe
from armillary.schedules.shared_stages import SharedPlacement, devices_for
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import StageContext, TrainSpec, in_a_row
from armillary.transport.transport import Transport
from benchmarks.cyclic_ring.modes import Waiting

LAYERS, WIDTH = 8, 256  # of a stage: 2.1 MB of weights
MODES = ("replicas", "shared", "pipeline")

Batch = tuple[Tensor, Tensor]  # what the first stage reads, what the loss wants


@dataclass(frozen=True)
class Sizes:
    """workers: N. samples: of a micro-batch. stage_seconds: forward and backward of one stage of one micro-batch."""

    workers: int
    slack: int
    samples: int
    stage_seconds: float


@dataclass(frozen=True)
class Mode:
    """What trains. `busy_seconds`: what this process has spent in layers so far."""

    step: Callable[[], object]
    settle: Callable[[], object]
    busy_seconds: Callable[[], float]


@dataclass(frozen=True)
class Forecast:
    """By the schedule alone. busy_share: of a device's time, mean over devices. held: micro-batches of a stage that the
    fullest device keeps."""

    devices: int
    busy_share: float
    held: int


def forecast(mode: str, workers: int, slack: int) -> Forecast:
    """Of stages that are equal, on devices that wait for nothing else."""
    if mode == "shared":
        return Forecast(devices_for(workers), SharedPlacement(cyclic(workers, slack=slack)).utilisation, 1)
    schedule = gpipe(workers, 1) if mode == "replicas" else cyclic_pipeline(workers, workers, slack)
    busy = sum(action.ticks for row in schedule.ticks for action in row) / (schedule.period * workers)
    return Forecast(workers * (workers if mode == "replicas" else 1), busy, _held(schedule))


def make(name: str, transport: Transport, sizes: Sizes, batch: Batch) -> Mode:
    """
    Args:
        name: one of MODES.
        batch: handed in as every micro-batch.
    """
    stage, run = {"replicas": _replicas, "shared": _shared, "pipeline": _pipeline}[name](transport, sizes)
    batches = [batch] * run.schedule.micro_batches
    return Mode(partial(run.step, batches), run.settle, lambda: sum(layer.busy_seconds for layer in stage.module))


def replica(
    stage: Stage, optimizer: Optimizer, loss: Callable[[Any, Any], Tensor], transport: Transport
) -> Interpreter:
    """This process's stage of its replica. The transport's nodes are the replicas, its rails the stages.

    Its `step` takes the one micro-batch of the replica; gradients are final, and averaged, when the optimizer steps.
    """
    place = transport.place
    count = place.workers_per_node
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: _average(parameters, transport))
    channel, schedule = _InReplica(transport, place.rank - place.rank % count), gpipe(count, 1)
    seat = in_a_row(schedule, place.rank % count, channel)
    return Interpreter(_with_others(stage, count), optimizer, TrainSpec(schedule, loss), seat)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True)
class _InReplica:
    """The transport, with peers called by their stage. first: rank of the replica's stage 0."""

    transport: Transport
    first: int

    def post(self, message: Message) -> Any:
        return self.transport.post(replace(message, peer=self.first + message.peer))


def _average(parameters: Sequence[nn.Parameter], transport: Transport) -> None:
    """Over the processes of a stage, in place; a step without gradients (which moves nothing) asks nobody."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    total = transport.start(AllReduce(flat, "rail"), "gradients of a stage")()
    total /= transport.place.workers // transport.place.workers_per_node
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def _replicas(transport: Transport, sizes: Sizes) -> tuple[Stage, Interpreter]:
    stage, optimizer = _own(transport.place.rank % sizes.workers, sizes)
    return stage, replica(stage, optimizer, loss, transport)


def _shared(transport: Transport, sizes: Sizes) -> tuple[Stage, Interpreter]:
    schedule, rank = cyclic(sizes.workers, slack=sizes.slack), transport.place.rank
    own, optimizer = _own(SharedPlacement(schedule).stage_of(rank), sizes)
    seat = StageContext(rank, SharedPlacement(schedule), transport)
    return own, Interpreter(_with_others(own, sizes.workers), optimizer, TrainSpec(schedule, loss), seat)


def _pipeline(transport: Transport, sizes: Sizes) -> tuple[Stage, Interpreter]:
    stage, optimizer = _own(transport.place.rank, sizes)
    schedule = cyclic_pipeline(sizes.workers, sizes.workers, sizes.slack)
    seat = in_a_row(schedule, stage.index, transport)
    return stage, Interpreter(_with_others(stage, sizes.workers), optimizer, TrainSpec(schedule, loss), seat)


def _with_others(own: Stage, count: int) -> list[Stage]:
    """A model whose other stages are elsewhere."""
    return [own if j == own.index else _stage(j, nn.Identity()) for j in range(count)]


def _own(index: int, sizes: Sizes) -> tuple[Stage, Optimizer]:
    """The same weights wherever a stage is made."""
    torch.manual_seed(index)
    module = nn.Sequential(*(Waiting(sizes.stage_seconds / LAYERS, WIDTH) for _ in range(LAYERS)))
    return _stage(index, module), torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


def _stage(index: int, module: nn.Module) -> Stage:
    return Stage(index, module, {name: f"{index}.{name}" for name, _ in module.named_parameters()})


def _held(schedule: Schedule) -> int:
    """Micro-batches on the fullest worker, whose row is its stage, in the steady state."""
    found = [schedule.held(tick) for tick in range(2 * schedule.period, 3 * schedule.period)]
    return max(sum(stage == j for _, _, stage in held) for held in found for j in range(schedule.stages))
