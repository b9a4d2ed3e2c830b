"""A script's model, optimizer, batches and loss as a workload, so that scripts get what workloads get.

Models and optimizers handed out are copies: the script's own stay as they are.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.session.workload import Batch

__all__ = ["Script"]


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
