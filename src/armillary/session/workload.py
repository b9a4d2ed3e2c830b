"""What a workload is: a model, its data and what is said of both, whether built in or the user's own.

`train`, `plan` and `verify` need nothing else of a task. A workload is ordinary PyTorch and imports nothing of ours.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Batch", "Workload", "baseline", "baseline_name"]

Batch = Any


class Workload(Protocol):
    """What `workload(**options)` must return.

    A workload may also have `baseline() -> metrics`, in the terms of `report`: what a simpler method reaches
    on all of the held-out split; and `baseline_name`, what that method is called: "a smoothed bigram model".
    """

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """What `samples` counts, in the plural: "words"."""

    @property
    def steps(self) -> int:
        """How many optimizer steps a training run takes if nobody says otherwise."""

    @property
    def batch_size(self) -> int:
        """Examples in one worker's batch."""

    def model(self) -> nn.Module:
        """A new model with the initial values that the global random stream gives."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer: ...

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        """One epoch of this worker's share; split is "train" or "held_out". Shares do not overlap."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """A scalar to train by: the mean over the batch."""

    def samples(self, batch: Batch) -> int: ...

    def evaluate(self, model: Any, batch: Batch) -> Mapping[str, float]:
        """Sums over the batch, which add up over batches and workers."""

    def report(self, totals: dict[str, float]) -> Mapping[str, float]:
        """Metrics from the sums over the whole split."""


def baseline(workload: Workload) -> dict[str, float]:
    """What a simpler method reaches on the held-out split; empty if the workload does not say."""
    found: Callable[[], Mapping[str, float]] | None = getattr(workload, "baseline", None)
    return dict(found()) if found is not None else {}


def baseline_name(workload: Workload) -> str:
    """What the simpler method is called."""
    return str(getattr(workload, "baseline_name", "baseline"))
