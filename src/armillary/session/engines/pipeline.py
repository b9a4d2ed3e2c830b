"""A stage a process: the pipeline without a flush, GPipe and 1F1B are tables for one runtime."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from armillary.runtime.cyclic.pipeline import Pipeline
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.session.cyclic.own_stage import OwnStage
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.workload import Batch

__all__ = ["PipelineEngine"]


class PipelineEngine:
    """Losses are known on the last process."""

    beside_bytes = 0.0

    def __init__(self, parts: Parts) -> None:
        stage = parts.stages[parts.rank]
        self.parts = parts
        self.runtime = Pipeline(stage, parts.job.optimizer, parts.course, parts.channel, parts.tables.by_stage)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        self.teller = len(parts.stages) - 1
        self._own = OwnStage(parts.stages, parts.rank, parts.transport)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step(self.parts.given(batches))

    @contextmanager
    def newest(self) -> Iterator[None]:
        ranks = range(len(self.parts.stages))
        with self._own.whole(ranks, ranks):
            yield

    def detach(self) -> None:
        """There is no hook."""


for _name in ("pipeline", "gpipe", "one_f_one_b"):
    ENGINES.register(_name, PipelineEngine)
