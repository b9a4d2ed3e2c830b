"""Small models in stages, data and optimizers for the tests of schedules; the same in every process."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from armillary.schedules import NORMS, Clip, Schedule
from armillary.schedules.cyclic import cyclic
from armillary.stages.partition import Stage

WIDTH = 5
TIGHT, LOOSE = 0.4, 1.3  # norms that nearly every gradient here exceeds, and that some do
EVERY_CLIP = tuple(Clip(TIGHT, by) for by in NORMS)

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.02, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.02),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.5),
}


def block(stage: int, norm: type[nn.Module] | None = nn.LayerNorm, dropout: float = 0.2) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(1 + stage % 2)]
    layers += [norm(WIDTH)] if norm is not None else []
    return nn.Sequential(*layers, nn.Tanh(), nn.Dropout(dropout))


def stages_of(count: int, dtype: torch.dtype = torch.float64, **options: Any) -> nn.ModuleList:
    """`count` stages of different sizes, the same weights every time (in threads, too: by a generator of their own)."""
    stages = nn.ModuleList([block(stage, **options) for stage in range(count)]).to(dtype)
    generator = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in stages.parameters():
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((draw - 0.5) * 0.9 + (parameter.dim() == 1))
    return stages


class Twice(nn.Module):
    """Reads its weight twice; torch keeps one cast of it for both, and adds the two gradients before it casts back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(value)))


class Careful(nn.Module):
    """Leaves autocast for its product, whose backward would be in bfloat16 if autocast were on there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(value.float())


def data(steps: int, micro_batches: int, dtype: torch.dtype = torch.float64) -> list[list[tuple[Tensor, Tensor]]]:
    """[step][micro_batch] -> (input (3, WIDTH), target (3, WIDTH)), the same every time."""
    generator = torch.Generator().manual_seed(7)
    draw = torch.randn(steps, micro_batches, 2, 3, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return [[(pair[0], pair[1]) for pair in step] for step in draw]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def drop(optimizer: optim.Optimizer, at: int) -> optim.lr_scheduler.LRScheduler:
    """The rate falls to a tenth after `at` steps."""
    return optim.lr_scheduler.MultiStepLR(optimizer, [at], gamma=0.1)


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(these: Iterable[Tensor], those: Iterable[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(this, that) for this, that in zip(these, those, strict=True))


def as_stages(modules: Iterable[nn.Module]) -> list[Stage]:
    """Stages whose parameters are called "0.name", "1.name", ... in the model, which is the module list."""
    return [
        Stage(index, module, {name: f"{index}.{name}" for name, _ in module.named_parameters()})
        for index, module in enumerate(modules)
    ]


def unequal(workers: int) -> list[list[int]]:
    """(forward, backward) costs of workers + 1 stages that are nothing alike."""
    return [[1 + 2 * (stage % 3), 5 - stage % 4] for stage in range(workers + 1)]


def rings(workers: int) -> list[Schedule]:
    """The cyclic schedules every mode must get right: K = N, 2N and unequal; slack 0, 1 and N."""
    return [
        cyclic(workers, slack=slack, **cut)
        for cut in ({"stages": workers}, {"stages": 2 * workers}, {"costs": unequal(workers)})
        for slack in (0, 1, workers)
    ]
