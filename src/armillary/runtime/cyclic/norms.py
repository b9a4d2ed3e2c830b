"""What one worker of a ring knows of the norms of steps: made on the last worker, which makes every sum, or received.

Source: `schedules/messages.py`, Note [Norms].
"""

from collections.abc import Callable, Collection

from torch import Tensor

from armillary.runtime.cyclic.updates import clipped
from armillary.runtime.cyclic.versions import Means
from armillary.schedules.clipping import Clip, square_of_stage, square_of_step

__all__ = ["Norms"]

KEPT = 3  # of a home's stages one may be a step behind another, and wants the norm of the step before its own


class Norms:
    """
    Args:
        drains: the ring's own list; it grows.
        receive: waits for the squared norm of the next step not known here; only called at a home.
    """

    def __init__(self, clip: Clip | None, stages: int, drains: Collection[int], receive: Callable[[], Tensor]) -> None:
        self.clip, self.known = clip, 0  # steps whose norm is known here
        self._stages, self._drains, self._receive = stages, drains, receive
        self._squares: dict[int, Tensor] = {}  # of the norm over all stages, by step
        self._parts: dict[int, Tensor] = {}  # of the step under way, by stage

    def add(self, stage: int, gradients: Collection[Tensor]) -> Tensor | None:
        """On the last worker: a stage's mean gradients are there. With the first stage's, gives the step's square."""
        self._parts[stage] = square_of_stage(gradients)
        if len(self._parts) < self._stages:
            return None
        square, self._parts = square_of_step(self._parts), {}
        self._note(square)
        return square

    def wanted(self, step: int) -> int:
        """How many norms a home knows when it has closed the step before `step`, as it does in its course."""
        return 0 if self.clip is None else step if self.clip.waits else step - 1

    def learn(self, steps: int) -> None:
        """Receives until the norms of all steps before `steps` are known."""
        while self.known < steps:
            self._note(self._receive())

    def clipped(self, step: int, means: Means) -> Means:
        """A stage's mean gradients of a step, clipped."""
        if self.clip is None:
            return means
        of = self.clip.step_of_norm(step, self._drains)
        if of is None:
            return clipped(means, square_of_stage(means.values()), self.clip)
        self.learn(of + 1)
        return clipped(means, self._squares[of], self.clip)

    def _note(self, square: Tensor) -> None:
        self._squares[self.known] = square
        self.known += 1
        self._squares = {step: kept for step, kept in self._squares.items() if step >= self.known - KEPT}
