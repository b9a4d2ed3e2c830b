"""All micro-batches of a process on its one device: staggered, or one after the other (accumulation)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from armillary.runtime.cyclic.one_device import OneDevice
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.team import Team
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.workload import Batch

__all__ = ["OneDeviceEngine"]


class OneDeviceEngine:
    """Several processes do the same side by side, each with micro-batches of its own."""

    teller = None
    beside_bytes = 0.0

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        team = Team(parts.transport.place, parts.channel, parts.tables.by_stage)
        self.runtime = OneDevice(parts.stages, parts.job.optimizer, parts.course, team)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step(self.parts.given(batches))

    @contextmanager
    def newest(self) -> Iterator[None]:
        yield

    def detach(self) -> None:
        """There is no hook."""


for _name in ("one_device", "accumulation"):
    ENGINES.register(_name, OneDeviceEngine)
