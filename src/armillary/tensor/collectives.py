"""Collectives with a gradient: what one does in forward, and another in backward."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from armillary.tensor.groups import MeshAxis

__all__ = ["applied", "crossed", "own_gradient", "sum_backward", "sum_both", "sum_forward"]

Crossing = Callable[[Tensor], Tensor]


def applied(function: type[Function], *given: Any) -> Tensor:
    """Its result, typed: torch leaves `apply` without."""
    found: Tensor = function.apply(*given)
    return found


class _Crossed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Crossing, back: Crossing) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.back(dy), None, None


def crossed(x: Tensor, there: Crossing, back: Crossing) -> Tensor:
    """there(x), whose gradient goes through `back`."""
    return applied(_Crossed, x, there, back)


def sum_backward(x: Tensor, axes: Sequence[MeshAxis]) -> Tensor:
    """Alike on all ranks, used by each in its own way: gradients are summed over the axes."""

    def summed(dy: Tensor) -> Tensor:
        for axis in axes:
            dy = axis.sum(dy)
        return dy

    return crossed(x, _same, summed)


def sum_forward(x: Tensor, axis: MeshAxis) -> Tensor:
    """A partial sum on each rank, the sum on all, used alike by each."""
    return crossed(x, axis.sum, _same)


def sum_both(x: Tensor, axis: MeshAxis) -> Tensor:
    """A partial sum on each rank, the sum on all, used by each in its own way."""
    return crossed(x, axis.sum, axis.sum)


def own_gradient(x: Tensor) -> Tensor:
    """Alike, and its gradient is a tensor of its own: who changes one in place must not be seen to change another."""
    return crossed(x, _same, Tensor.clone)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
