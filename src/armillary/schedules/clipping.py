"""Clipping the gradient of a training step whose stages are updated at different times: by which norm, defined once.

Reference and runtimes must agree to the last bit, so what is summed in which order is said here and nowhere else. The
gradient is the mean over micro-batches. The square of a stage is the sum over its parameters, in the stage's order, of
the sum of squares of each, in float64; the square of a step is the sum over its stages, the last stage first, which is
the order in which backward finishes them. Gradients are multiplied by max_norm / (norm + 1e-6), at most by 1.

Source: torch.nn.utils.clip_grad_norm_. Departures: float64 instead of the gradient's dtype; the norms `stage` and
`previous`, for schedules that update a stage before the norm over all stages can be known.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["NORMS", "Clip", "Norm", "square_of_stage", "square_of_step"]

Norm = Literal["global", "stage", "previous"]
NORMS: tuple[Norm, ...] = get_args(Norm)

EPSILON = 1e-6


@dataclass(frozen=True)
class Clip:
    """By which norm a step's gradient is clipped.

    Args:
        max_norm: that the gradient keeps at most.
        by: "global": the norm over all stages, exact. "stage": each stage by its own. "previous": the norm over all
            stages of the step before; the first step, and the first after a drain, are clipped by "stage".

    Raises:
        ValueError: no such norm, or a `max_norm` that is not positive and finite.
    """

    max_norm: float
    by: Norm = "global"

    def __post_init__(self) -> None:
        if self.by not in NORMS or not (isfinite(self.max_norm) and self.max_norm > 0):
            raise ValueError(
                f"schedule: clip wants a positive norm and one of {', '.join(NORMS)}; got {self.max_norm}, {self.by!r}"
            )

    @property
    def waits(self) -> bool:
        """Whether a stage's update waits for the gradients of all stages of its step."""
        return self.by == "global"

    @property
    def needs_all_stages(self) -> bool:
        """Whether stages must learn of one another's gradients."""
        return self.by != "stage"

    def over(self, stages: int) -> "Clip":
        """The same, where there are so many: the norm over all of one is its own, which nobody need be told."""
        return replace(self, by="stage") if stages == 1 and self.by == "global" else self

    def step_of_norm(self, step: int, drains: Collection[int]) -> int | None:
        """The step by whose norm over all stages a step is clipped; None: each of its stages by its own."""
        if self.by == "global":
            return step
        return None if self.by == "stage" or step == 0 or step in drains else step - 1

    def factor(self, square: Tensor) -> Tensor:
        """What gradients are multiplied with, from the square of the norm; stays on its device."""
        return (self.max_norm / (square.sqrt() + EPSILON)).clamp(max=1.0)


def square_of_stage(gradients: Iterable[Tensor]) -> Tensor:
    """One float64: the squared norm of a stage's mean gradients, which come in the order of the stage's parameters."""
    square = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        # one flat row: of another layout the same numbers might be added up in another order
        square = square + gradient.detach().contiguous().view(-1).double().square().sum()
    return square


def square_of_step(squares: Mapping[int, Tensor]) -> Tensor:
    """The squared norm over all stages, from those of the stages by their numbers."""
    return sum((squares[stage] for stage in sorted(squares, reverse=True)), torch.zeros((), dtype=torch.float64))
