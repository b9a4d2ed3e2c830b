"""When the stages of a process are stepped: at once, or as soon as the norm is known by which the step is clipped.

A stage's gradient may be finished long before the norm over all stages is. It waits here with its step's learning rate,
and nothing reads the weights meanwhile: that is the schedule's to see to (`schedules/norm_in_time.py`), and a version
that is missing raises.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.partition.stages import Stage
from armillary.schedules.clipping import Clip, square_of_stage

__all__ = ["Stepped", "Updates", "clipped", "forget_others"]


class Stepped(Protocol):
    """The weights of one stage, as far as their steps go."""

    @property
    def newest(self) -> int:
        """The version there is."""

    def advance(self, gradients: Means, options: Options) -> None:
        """Makes the next one."""


def clipped(means: Means, square: Tensor, clip: Clip) -> Means:
    """The gradients multiplied by one factor, from the squared norm."""
    factor = clip.factor(square)
    return {parameter: gradient * factor for parameter, gradient in means.items()}


def forget_others(optimizer: Optimizer, stages: Sequence[Stage], owned: Collection[int]) -> None:
    """The optimizer loses the state of what no stage owned here holds."""
    kept = {parameter for stage in stages if stage.index in owned for parameter in stage.module.parameters()}
    for parameter in [one for stage in stages for one in stage.module.parameters() if one not in kept]:
        optimizer.state.pop(parameter, None)


class Updates:
    """Of the stages of one process.

    Args:
        drains: the run's own list; it grows.
    """

    def __init__(self, weights: Sequence[Stepped], clip: Clip | None, drains: Collection[int]) -> None:
        self._weights, self._clip, self._drains = weights, clip, drains
        self._options: dict[int, Options] = {}
        self._waiting: list[tuple[Stepped, int, Means]] = []
        self._squares: dict[int, Tensor] = {}  # of the norm over all stages, by step

    def begin(self, step: int, options: Options) -> None:
        """A step is handed in, with the optimizer's options of this moment."""
        if self._weights:
            self._options[step] = options

    def complete(self, weights: Stepped, step: int, means: Means) -> None:
        """A stage's gradients of a step are all there."""
        self._waiting.append((weights, step, means))
        self._advance()

    def know(self, step: int, square: Tensor) -> None:
        """The squared norm over all stages of a step."""
        self._squares = {s: kept for s, kept in self._squares.items() if s >= step - 1}
        self._squares[step] = square
        self._advance()

    @property
    def first_open(self) -> int:
        """The first step for which a stage here is still to be stepped."""
        return min((weights.newest for weights in self._weights), default=0)

    def _advance(self) -> None:
        waiting, self._waiting = self._waiting, []
        for weights, step, means in waiting:
            ready = self._clipped(step, means)
            if ready is None:
                self._waiting.append((weights, step, means))
            else:
                weights.advance(ready, self._options[step])
        self._options = {step: kept for step, kept in self._options.items() if step >= self.first_open}

    def _clipped(self, step: int, means: Means) -> Means | None:
        if self._clip is None:
            return means
        of = self._clip.step_of_norm(step, self._drains)
        square = square_of_stage(means.values()) if of is None else self._squares.get(of)
        return None if square is None else clipped(means, square, self._clip)
