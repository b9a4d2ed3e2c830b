"""Ways to take one optimizer step on N micro-batches in one process; each yields what holds activations, and when."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from armillary.schedules import Schedule
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage, chain, costs, cut
from armillary.stages.train_spec import TrainSpec
from benchmarks.cyclic_memory.models import Shape, loss

NAMES = ("concurrent", "cyclic", "one big batch", "accumulation", "concurrent, recomputed", "cyclic, recomputed")


@dataclass(frozen=True)
class Contender:
    """Ready to train. `schedule` is None for the plain loop over one big batch."""

    step: Callable[[], Any]
    settle: Callable[[], Any]
    stages: Sequence[Stage]
    schedule: Schedule | None


def build(name: str, shape: Shape, workers: int, samples: int) -> Contender:
    """`name` is one of NAMES; `samples` a micro-batch."""
    torch.manual_seed(0)
    model = shape.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [shape.batch(samples) for _ in range(workers)]  # the same every step: what a loader holds is not counted
    links = chain(model)
    stages = cut(model, links, range(1, len(links)))
    if name == "one big batch":
        inputs, targets = (torch.cat(parts) for parts in zip(*batches))
        del batches
        return Contender(lambda: _plain(model, optimizer, inputs, targets), lambda: None, stages, None)
    schedule = {
        "concurrent": lambda: simultaneous(workers, len(stages)),
        "cyclic": lambda: cyclic(workers, costs=costs(links, shape.batch(1)[0])),
        "accumulation": lambda: accumulation(workers, len(stages)),
    }[name.partition(",")[0]]()
    recompute = frozenset(range(len(stages))) if "recomputed" in name else frozenset[int]()
    run = Interpreter(stages, optimizer, TrainSpec(schedule, loss, recompute=recompute))
    return Contender(lambda: run.step(batches), run.settle, stages, schedule)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, target: Tensor) -> None:
    value: Tensor = loss(model(inputs), target)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
