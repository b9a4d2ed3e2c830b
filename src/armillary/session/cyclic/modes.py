"""The runtimes of the modes under one face: step, settle, drain, and a look at the newest weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.autocast import without_autocast
from armillary.runtime.cyclic.one_device import OneDevice
from armillary.runtime.cyclic.pipeline import Pipeline
from armillary.runtime.cyclic.ring_loop import RingLoop
from armillary.runtime.cyclic.shared import Shared
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.zero_loop import ZeroLoop
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss
from armillary.session.cyclic.own_stage import OwnStage
from armillary.session.workload import Batch

__all__ = ["Mode", "OneDeviceMode", "PipelineMode", "RingMode", "SharedMode", "ZeroRingMode"]


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
    def __init__(self, runtime: Pipeline, input_of: InputOf, stages: Sequence[Stage], transport: Transport) -> None:
        self.runtime, self.input_of = runtime, input_of
        self.settle, self.drain = runtime.settle, runtime.drain
        self._own = OwnStage(stages, transport.place.rank, transport)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step([(self.input_of(batch), batch) for batch in batches])

    @contextmanager
    def newest(self) -> Iterator[None]:
        ranks = range(self.runtime.schedule.stages)
        with self._own.whole(ranks, ranks):
            yield


class SharedMode:
    def __init__(self, runtime: Shared, input_of: InputOf, stages: Sequence[Stage], transport: Transport) -> None:
        self.runtime, self.input_of = runtime, input_of
        self.settle, self.drain = runtime.settle, runtime.drain
        self._own = OwnStage(stages, runtime.part.index, transport)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step([(self.input_of(batch), batch) for batch in batches])

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Buffers come from the device of the last micro-batch."""
        sharing, last = self.runtime.sharing, max(self.runtime.part.steps - 1, 0)
        stages = range(self.runtime.schedule.stages)
        with self._own.whole([sharing.home(j) for j in stages], [sharing.last(last, j) for j in stages]):
            yield


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
