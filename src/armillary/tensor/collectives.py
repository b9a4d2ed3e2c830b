"""Collectives with a gradient: what one does in forward, and another in backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from armillary.tensor.groups import MeshAxis

__all__ = ["AllToAllBoth", "SumBackward", "SumBoth", "SumForward", "SumTogether", "applied"]


def applied(function: type[Function], *given: Any) -> Tensor:
    """Its result, typed: torch leaves `apply` without."""
    found: Tensor = function.apply(*given)
    return found


class SumBackward(Function):
    """Alike on all ranks, used by each in its own way: gradients are summed over the axes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[MeshAxis]) -> Tensor:
        ctx.axes = axes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        for axis in ctx.axes:
            dy = axis.sum(dy)
        return dy, None


class SumTogether(Function):
    """As `SumBackward`, for several of one shape by one sum. Each gradient is a tensor of its own: whoever changes one
    in place must not be seen to change another."""

    @staticmethod
    def forward(ctx: Any, axes: Sequence[MeshAxis], *several: Tensor) -> Any:
        ctx.axes = axes
        return tuple(x.view_as(x) for x in several)

    @staticmethod
    def backward(ctx: Any, *several: Tensor) -> Any:
        summed = torch.stack(several)
        for axis in ctx.axes:
            summed = axis.sum(summed)
        return None, *(one.clone() for one in summed.unbind())


class SumForward(Function):
    """A partial sum on each rank, the sum on all, used alike by each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class SumBoth(Function):
    """A partial sum on each rank, the sum on all, used by each in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.axis.sum(dy), None


class AllToAllBoth(Function):
    """From pieces along `into` to pieces along `split`, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, split: int, into: int) -> Tensor:
        ctx.axis, ctx.split, ctx.into = axis, split, into
        return axis.all_to_all(x, split, into)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.axis.all_to_all(dy, ctx.into, ctx.split), None, None, None
