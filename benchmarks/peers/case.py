"""What is trained: a model, its optimizer, loss and batches, the same for every contender.

A case's model is the same at each call and on each rank, so a contender that trains anew at every turn begins where
all others began, and its losses can be compared with theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = Any
Step = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A training that every contender carries out.

    Args of note:
        model: makes the model; `sparse_model` makes it with tables whose gradients are sparse tensors.
        borrowed: makes it of values that ranks share and nobody may write to: for what copies the rows it keeps.
        draw: the endless batches of a rank.
        samples: in a batch of one rank, counted in `unit`.
        kind: optimizer class; `options` are its arguments; `unfused_options` those for sparse gradients and
            DTensors, which not every fused kernel takes.
        tables: names of the parameters that are read by row.
        refused: contender -> why it has no number here.
    """

    name: str
    model: Callable[[], nn.Module]
    sparse_model: Callable[[], nn.Module]
    borrowed: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[int], Iterator[Batch]]
    samples: float
    unit: str
    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    unfused_options: Mapping[str, Any]
    tables: tuple[str, ...]
    refused: Mapping[str, str]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.kind(parameters, **self.options)

    def unfused_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.kind(parameters, **self.unfused_options)

    def batches(self) -> Iterator[Batch]:
        """Those of this rank."""
        return self.draw(dist.get_rank())

    def few(self) -> list[Batch]:
        """What all ranks draw in their first two steps, step by step."""
        drawn = [list(islice(self.draw(rank), 2)) for rank in range(dist.get_world_size())]
        return [batch for together in zip(*drawn, strict=True) for batch in together]


def plain_loop(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> Step:
    """The training loop of one process, a step at a time; returns this rank's loss before the update."""

    def step() -> float:
        loss = case.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
