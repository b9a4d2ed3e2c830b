"""The losses of training steps, put together as their micro-batches come in."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["LossBook", "StepLosses"]


@dataclass(frozen=True, eq=False)
class StepLosses:
    """The losses of all micro-batches of one training step, in their order."""

    step: int
    losses: tuple[Tensor, ...]


class LossBook:
    """Open steps; a step is given out once, when its last loss is in."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._open: dict[int, dict[int, Tensor]] = {}

    def enter(self, step: int, micro_batch: int, loss: Tensor) -> None:
        self._open.setdefault(step, {})[micro_batch] = loss

    def complete(self) -> list[StepLosses]:
        """The steps that have become complete since the last call, in order."""
        steps = sorted(step for step, losses in self._open.items() if len(losses) == self._micro_batches)
        found = [(step, self._open.pop(step)) for step in steps]
        return [StepLosses(step, tuple(losses[m] for m in sorted(losses))) for step, losses in found]
