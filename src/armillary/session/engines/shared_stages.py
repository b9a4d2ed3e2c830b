"""Devices of a model whose stages are shared by staggered micro-batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from armillary.runtime.cyclic.shared import Shared
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.session.cyclic.own_stages import OwnStages
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.workload import Batch

__all__ = ["SharedEngine"]


class SharedEngine:
    """Losses are known on the last stage's device."""

    beside_bytes = 0.0
    units = ()

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.runtime = Shared(parts.stages, parts.job.optimizer, parts.spec, parts.channel, parts.rank)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        self.teller = self.runtime.sharing.ranks(len(parts.stages) - 1)[0]
        self._own = OwnStages(parts.stages, [self.runtime.part.index], parts.transport)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step(self.parts.given(batches))

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Buffers come from the device of the last micro-batch."""
        sharing, last = self.runtime.sharing, max(self.runtime.part.steps - 1, 0)
        stages = range(len(self.parts.stages))
        with self._own.whole([sharing.home(j) for j in stages], [sharing.last(last, j) for j in stages]):
            yield

    def detach(self) -> None:
        """There is no hook."""


ENGINES.register("shared_stages", SharedEngine)
