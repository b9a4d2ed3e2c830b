"""The ways to train one model on N workers that are compared: alone, DDP, one step late, and round the ring.

Each is two functions: `step()` trains on this worker's batch and returns the loss, `settle()` finishes what is on its
way. All begin with the same weights, see the same batches and step plain SGD with the mean gradient.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from armillary.exchanges import build_dense
from armillary.runtime.dense_unit import dense_unit
from armillary.schedules.cyclic import cyclic
from armillary.session.delayed_loop import OwnLoop
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import StageReplicas, TrainSpec, in_a_row
from armillary.transport.transport import Transport

LAYERS, WIDTH = 10, 1000
LEARNING_RATE = 5.0
LATE_BUCKET_BYTES = 5 * 2**20


@dataclass(frozen=True)
class Mode:
    """What trains."""

    step: Callable[[], Tensor]
    settle: Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """batch: samples a worker and step. stages: of the ring, which divide the layers.

    waiting_seconds: if not 0, layers do not compute but wait, so long for forward and backward of all of them: workers
    with a processor of their own, however many share this one.
    """

    batch: int
    stages: int
    waiting_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.stages < 1 or LAYERS % self.stages:
            raise ValueError(f"cyclic_ring: want batch >= 1 and stages that divide {LAYERS} layers, got {self}")


def modes(transport: Transport, sizes: Sizes) -> Mapping[str, Callable[[], Mode]]:
    """By name, each ready to be built."""
    workers = transport.place.workers
    return {
        "compute": partial(_alone, transport, sizes),
        "all_reduce": partial(_all_reduce_alone, sizes),
        "ddp_25mb": partial(_ddp, transport, sizes, 25),
        "ddp_5mb": partial(_ddp, transport, sizes, 5),
        "ddp_2mb": partial(_ddp, transport, sizes, 2),
        "delayed": partial(_delayed, transport, sizes),
        "ring_v1": partial(_ring, transport, sizes, workers),
        "ring_slack1": partial(_ring, transport, sizes, 1),
        "ring_slack0": partial(_ring, transport, sizes, 0),
    }


def _model(sizes: Sizes) -> nn.Sequential:
    """A multi-layer perceptron, its layers in as many blocks as there are stages."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        if sizes.waiting_seconds:
            layers = [nn.Sequential(Waiting(sizes.waiting_seconds / LAYERS, WIDTH)) for _ in range(LAYERS)]
    size = LAYERS // sizes.stages
    return nn.Sequential(*[nn.Sequential(*layers[first : first + size]) for first in range(0, LAYERS, size)])


class Waiting(nn.Linear):
    """A layer of the same parameters that takes a third of `seconds` forward and the rest backward, without work.

    It keeps its input for its backward, as a layer that works does. busy_seconds: spent in it so far, both ways.
    """

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__(width, width)
        self.seconds, self.busy_seconds = seconds, 0.0

    def forward(self, value: Tensor) -> Tensor:
        return _Wait.apply(value, self.weight, self.bias, self)


class _Wait(torch.autograd.Function):
    """Passes its input on; a parameter's gradient is the parameter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor, layer: Waiting) -> Tensor:
        begun = time.perf_counter()
        ctx.layer = layer
        ctx.save_for_backward(value, weight, bias)
        time.sleep(layer.seconds / 3)
        passed = value.clone()
        layer.busy_seconds += time.perf_counter() - begun
        return passed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        begun, layer = time.perf_counter(), ctx.layer
        _, weight, bias = ctx.saved_tensors
        time.sleep(layer.seconds * 2 / 3)
        found = gradients[0], weight.detach().clone(), bias.detach().clone(), None
        layer.busy_seconds += time.perf_counter() - begun
        return found


def _batch(transport: Transport, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """This worker's inputs and targets, (batch, WIDTH) each; the same every step."""
    stream = torch.Generator().manual_seed(transport.place.rank)
    whole = torch.randn(2, sizes.batch, WIDTH, generator=stream)
    return whole[0].requires_grad_(sizes.waiting_seconds > 0), whole[1]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The user's plain loop, once."""
    loss = _loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _nothing() -> None:
    """Of modes that leave nothing on its way."""


def _alone(transport: Transport, sizes: Sizes) -> Mode:
    model = _model(sizes)
    return Mode(partial(_step, model, _sgd(model), _batch(transport, sizes)), _nothing)


def _all_reduce_alone(sizes: Sizes) -> Mode:
    """No training: the gradients' bytes in one all-reduce, which says what the link can do."""
    whole = torch.zeros(sum(parameter.numel() for parameter in _model(sizes).parameters()))

    def step() -> Tensor:
        dist.all_reduce(whole)
        return whole[0]

    return Mode(step, _nothing)


def _ddp(transport: Transport, sizes: Sizes, bucket_mib: int) -> Mode:
    model = _model(sizes)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    return Mode(partial(_step, parallel, _sgd(model), _batch(transport, sizes)), _nothing)


def _ring(transport: Transport, sizes: Sizes, slack: int) -> Mode:
    model = _model(sizes)
    stages = [
        Stage(index, module, {name: f"{index}.{name}" for name, _ in module.named_parameters()})
        for index, module in enumerate(model)
    ]
    optimizer = _sgd(model)
    schedule = cyclic(transport.place.workers, slack=slack, costs=[(1, 2)] * sizes.stages)
    seat = in_a_row(schedule, transport.place.rank, transport)
    run = Interpreter(stages, optimizer, TrainSpec(schedule, _loss), seat)
    batch = _batch(transport, sizes)

    def step() -> Tensor:
        known = run.step([(batch[0], batch[1])])
        return known[-1].losses[0] if known else torch.zeros(())

    return Mode(step, run.settle)


def _delayed(transport: Transport, sizes: Sizes) -> Mode:
    """Late by one step, like a ring with slack N."""
    model, place = _model(sizes), transport.place
    optimizer = _sgd(model)
    units = [
        dense_unit(label, {str(number): one for number, one in enumerate(bucket)}, build_dense("all_reduce"), place)
        for label, bucket in _late_buckets(model).items()
    ]
    run = OwnLoop(StageReplicas(place, transport, groups={0: units}).reducer(0, is_late=True), optimizer)
    return Mode(partial(_step, model, optimizer, _batch(transport, sizes)), run.settle)


def _late_buckets(model: nn.Module) -> Mapping[str, list[nn.Parameter]]:
    """In the order in which gradients appear, none above LATE_BUCKET_BYTES unless it holds one parameter."""
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if buckets[-1] and sum(p.nbytes for p in buckets[-1]) + parameter.nbytes > LATE_BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return {f"bucket {place}": bucket for place, bucket in enumerate(buckets)}
