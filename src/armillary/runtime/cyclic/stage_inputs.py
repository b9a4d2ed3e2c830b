"""The inputs of a stage: leaves of its graph, and what its module is given in their place.

Autograd forbids to write in the place of a leaf. A module may: a stage may begin with `ReLU(inplace=True)`. So modules
get the same memory as a result of the leaf. It shares the leaf's version counter, so torch still names what was written
and is wanted by a backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["StageInputs"]


class StageInputs:
    """Of one micro-batch.

    Args:
        stage: its number, for errors.
    """

    def __init__(self, stage: int, leaves: Sequence[Any]) -> None:
        self.leaves = list(leaves)
        self._stage, self._versions = stage, dict[int, int]()  # of leaves that are read again

    def given(self) -> list[Any]:
        """For the module, a part for each leaf."""
        return [_Given.apply(leaf) if _asks(leaf) else leaf for leaf in self.leaves]  # type: ignore[no-untyped-call]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward that is to run again. What it writes into goes to its writer; the leaf is a copy then."""
        before, copies = self._counted(), [_copy(leaf) for leaf in self.leaves]
        yield
        for place, version in self._counted().items():
            if version != before[place]:
                self.leaves[place] = copies[place]
        self._versions = self._counted()

    def refuse_written(self) -> None:
        """Before it runs again.

        Raises:
            RuntimeError: somebody wrote into a leaf since the first run.
        """
        for place, version in self._versions.items():
            if self.leaves[place]._version != version:
                raise RuntimeError(
                    f"stage {self._stage} is recomputed, but number {place} of the tensors that it reads, of shape "
                    f"{tuple(self.leaves[place].shape)}, was written in place since its forward; want it unchanged "
                    "until its backward: write into a copy, or take the stage out of recompute"
                )

    def _counted(self) -> dict[int, int]:
        """Version counters by place; tensors of inference mode have none, and cannot be written."""
        tensors = {place: leaf for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        return {place: leaf._version for place, leaf in tensors.items() if not leaf.is_inference()}


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # what nobody uses has no gradient
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def _asks(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
