"""What a workload is: a model, its data and what is said of both, built in or a script's own.

`train`, `plan` and `verify` need nothing else of a task. A built-in workload is ordinary PyTorch and imports nothing of
the library. A `Script` hands out copies, so the script's own model and optimizer stay as they are. `TrainBatches` is a
worker's share of the data.
"""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "Batch",
    "Script",
    "TrainBatches",
    "Workload",
    "baseline",
    "baseline_name",
    "device_of",
    "opened",
    "stream_seed",
    "together",
]

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


class Script:
    """What `Workload` asks for; see there. Batches are drawn when they are wanted, each once, and kept."""

    name, unit, batch_size = "this script", "batches", 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Iterable[Batch],
        loss: Callable[[nn.Module, Batch], Tensor],
        steps: int,
        who: str = "verify",
    ) -> None:
        """
        Args:
            batches: the same on every rank; of step s, worker w of n takes the one numbered s * n + w.
            who: asks, for errors.

        Raises:
            ValueError: the optimizer holds a parameter that the model does not have.
        """
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{who}: takes one optimizer, got a {type(optimizer).__name__}; make one of them, with groups of "
                "parameters"
            )
        self.steps, self.loss, self.who = steps, loss, who
        self._model, self._optimizer = model, optimizer
        self._source, self._drawn = iter(batches), list[Batch]()
        self._places: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(model.parameters())}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strangers := sum(parameter not in self._places for parameter in held):
            raise ValueError(
                f"{who}: {strangers} of the {len(held)} tensors of the optimizer are not parameters of the model; "
                "make the optimizer over model.parameters()"
            )

    def model(self) -> nn.Module:
        return copy.deepcopy(self._model)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """As the script's, with its state, over a copy's parameters in the order of the script's own."""
        copies = list(parameters)
        twin = copy.copy(self._optimizer)
        twin.param_groups = [
            {**group, "params": [copies[self._places[one]] for one in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        twin.state = defaultdict(dict)
        for parameter, entries in self._optimizer.state.items():
            mine = copies[self._places[parameter]]
            twin.state[mine] = {name: _like(value, parameter, mine) for name, value in entries.items()}
        return twin

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        """This worker's; without end but for that of the script's own batches.

        Raises:
            ValueError: (as it is drawn) the script's batches have run out.
        """
        number = worker
        while True:
            yield self._batch(number, workers)
            number += workers

    def _batch(self, number: int, workers: int) -> Batch:
        while len(self._drawn) <= number:
            try:
                self._drawn.append(next(self._source))
            except StopIteration:
                raise ValueError(
                    f"{self.who}: batches gave {len(self._drawn)}, which does not do for {self.steps} steps of "
                    f"{workers} batches each; give {self.steps * workers}, or ask for fewer steps"
                ) from None
        return self._drawn[number]

    def samples(self, batch: Batch) -> int:
        return 1

    def evaluate(self, model: Any, batch: Batch) -> Mapping[str, float]:
        return {}

    def report(self, totals: dict[str, float]) -> Mapping[str, float]:
        return {}


def _like(value: Any, before: Tensor, after: Tensor) -> Any:
    """A copy of an entry of the optimizer's state; what has the parameter's shape takes its copy's dtype."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    follows = value.shape == before.shape and value.is_floating_point()
    return value.detach().to(after.dtype if follows else value.dtype, copy=True, memory_format=torch.preserve_format)


def stream_seed(seed: int, step: int, worker: int) -> int:
    """The seed of a worker's random stream at a step, so that a resumed or a replayed step draws what it drew."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {worker}".encode()).digest()[:7])


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes; the host if nothing in it says."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


class TrainBatches:
    """A worker's training batches, epoch after epoch. `epoch` and `drawn` say where it stands.

    Raises:
        ValueError: (at the first draw) the worker has no batch at all.
    """

    def __init__(self, workload: Workload, place: tuple[int, int], seed: int, epoch: int = 0, drawn: int = 0):
        self.workload, self.place, self.seed = workload, place, seed
        self.epoch, self.drawn = epoch, drawn
        self.source = self._open()
        for _ in islice(self.source, drawn):  # where a resumed run left off
            pass

    def _open(self) -> Iterator[Batch]:
        return self.workload.batches("train", *self.place, self.seed + self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        for batch in self.source:
            self.drawn += 1
            return batch
        if not self.drawn:
            worker, workers = self.place
            raise ValueError(
                f"rank {worker}: {self.workload.name} has no training batch for worker {worker} of {workers}; "
                "take a smaller batch_size, fewer workers or more data"
            )
        self.epoch, self.drawn = self.epoch + 1, 0
        self.source = self._open()
        return next(self)

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; JSON-able."""
        return {"epoch": self.epoch, "examples": self.drawn * self._together}

    @property
    def _together(self) -> int:
        """Examples that all workers draw at once."""
        return self.workload.batch_size * self.place[1]

    @classmethod
    def resume(cls, workload: Workload, place: tuple[int, int], seed: int, state: Mapping[str, int]) -> "TrainBatches":
        """Goes on where `state` left off; with other batches or workers, after as many examples (rounded down)."""
        drawn = state["examples"] // (workload.batch_size * place[1])
        return cls(workload, place, seed, state["epoch"], drawn)


def opened(
    workload: Workload, mine: Sequence[int], count: int, seed: int, left: Mapping[str, Any] | None = None
) -> list[TrainBatches]:
    """A feed for each micro-batch that this rank hands in, of `count` in a step.

    Args:
        left: the place that `together` gave to an earlier part of the training, on this rank or another.
    """
    if left is None:
        return [TrainBatches(workload, (number, count), seed) for number in mine]
    states = left.get("feeds", [])
    if len(states) != len(mine):
        states = [left["feed"]] * len(mine)
    return [
        TrainBatches.resume(workload, (number, count), seed, state) for number, state in zip(mine, states, strict=True)
    ]


def together(feeds: Sequence[TrainBatches]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
    """A step's batches, one of each feed, with the place in the data after them. A loop that prefetches holds a batch
    while the feed has drawn others; what it saves is the place of the one it holds."""
    while True:
        batches = [next(feed) for feed in feeds]
        states = [feed.state() for feed in feeds]
        yield batches, {"feed": states[0], **({"feeds": states} if len(states) > 1 else {})}
