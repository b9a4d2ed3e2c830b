"""A workload in float64, where rounding cannot hide a fault."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.structure import mapped
from armillary.session.workload import Batch, Workload

__all__ = ["InDouble", "doubled"]


@dataclass(frozen=True)
class InDouble:
    """The same workload with parameters, buffers and real-valued batches in float64."""

    workload: Workload

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def unit(self) -> str:
        return self.workload.unit

    @property
    def steps(self) -> int:
        return self.workload.steps

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    def model(self) -> nn.Module:
        return self.workload.model().double()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.workload.optimizer(parameters)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        return map(doubled, self.workload.batches(split, worker, workers, seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    def samples(self, batch: Batch) -> int:
        return self.workload.samples(batch)

    def evaluate(self, model: Any, batch: Batch) -> Mapping[str, float]:
        return self.workload.evaluate(model, batch)

    def report(self, totals: dict[str, float]) -> Mapping[str, float]:
        return self.workload.report(totals)


def doubled(batch: Any) -> Any:
    """The batch with its real-valued tensors in float64, whatever nest holds them."""
    if isinstance(batch, Mapping):
        return {key: doubled(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(doubled, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(doubled, batch))
    return mapped(lambda one: one.double() if one.is_floating_point() else one, batch)
