"""The runtimes of the modes under one face: step, settle, drain, and a look at the newest weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.autocast import without_autocast
from armillary.runtime.cyclic.one_device import OneDevice
from armillary.runtime.cyclic.pipeline import Pipeline
from armillary.runtime.cyclic.ring_loop import RingLoop
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.zero_loop import ZeroLoop
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss
from armillary.session.workload import Batch

__all__ = ["Mode", "OneDeviceMode", "PipelineMode", "RingMode", "ZeroRingMode"]


def held_whole(stage: Stage) -> list[nn.Parameter]:
    """The parameters of a stage whose rows are not spread over the processes."""
    return [p for p in stage.module.parameters() if not isinstance(p, TableHandle)]


InputOf = Callable[[Batch], Any]  # what the first stage reads
Training = tuple[nn.Module, Optimizer, Loss]


class Mode(Protocol):
    """What the runtimes of the modes have in common."""

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]: ...

    def settle(self) -> list[StepLosses]: ...

    def drain(self) -> list[StepLosses]: ...

    def newest(self) -> AbstractContextManager[None]:
        """Everything is settled; inside, the whole model holds the newest weights."""


class OneDeviceMode:
    def __init__(self, runtime: OneDevice, input_of: InputOf) -> None:
        self.runtime, self.input_of = runtime, input_of
        self.settle, self.drain = runtime.settle, runtime.drain

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step([(self.input_of(batch), batch) for batch in batches])

    @contextmanager
    def newest(self) -> Iterator[None]:
        yield


class PipelineMode:
    """Between looks a process holds the weights of its own stage only; the other parameters of its model are empty."""

    def __init__(self, runtime: Pipeline, input_of: InputOf, stages: Sequence[Stage], transport: Transport) -> None:
        self.runtime, self.input_of, self.stages, self.transport = runtime, input_of, stages, transport
        self.settle, self.drain = runtime.settle, runtime.drain
        others = [stage for stage in stages if stage.index != transport.place.rank]
        self._away = [(p, p.shape) for stage in others for p in held_whole(stage)]
        self._empty()

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step([(self.input_of(batch), batch) for batch in batches])

    @contextmanager
    def newest(self) -> Iterator[None]:
        for parameter, shape in self._away:
            parameter.data = parameter.data.new_empty(shape)
        with torch.no_grad():
            for stage in self.stages:
                for tensor in [*held_whole(stage), *stage.module.buffers()]:
                    self.transport.spread(tensor, stage.index)
        try:
            yield
        finally:
            self._empty()

    def _empty(self) -> None:
        for parameter, _ in self._away:
            parameter.data = parameter.data.new_empty(0)


class RingMode:
    """The user's plain loop, which the ring's hooks follow."""

    def __init__(self, runtime: RingLoop, training: Training) -> None:
        self.runtime, self.training = runtime, training
        self.newest = runtime.newest

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return [StepLosses(self.runtime.ring.steps, (_plain_step(self.training, batches[0]),))]

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []


class ZeroRingMode:
    """As `RingMode`. Between looks a process holds the weights of its home stages only, in its optimizer.

    held_bytes: weights and gradients that were here or on their way, beside those at home: the mean over actions.
    """

    def __init__(self, runtime: ZeroLoop, training: Training, transport: Transport) -> None:
        self.runtime, self.training, self.transport = runtime, training, transport

    @property
    def held_bytes(self) -> float:
        return self.runtime.ring.mean_token_bytes

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return [StepLosses(self.runtime.ring.steps, (_plain_step(self.training, batches[0]),))]

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []

    def newest(self) -> AbstractContextManager[None]:
        return self.runtime.newest(self.transport.spread)


def _plain_step(training: Training, batch: Batch) -> Tensor:
    """The user's loop, once; returns the loss."""
    model, optimizer, loss = training
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, batch)
    with without_autocast(value.device.type):
        value.backward()
        optimizer.step()
    return value.detach()
