"""Linear layers of which each rank holds a piece of the weight, as an ordinary parameter.

`ColumnLinear` and `RowLinear` are Megatron-LM's pair (Shoeybi et al., 2019): a sum in forward behind the row layer, a
sum in backward before the column layer, once for all column layers that read one tensor. `GatheredLinear` is the
layer of the 2-d, 2.5-d and 3-d ways: pieces of input and weight are gathered, used, and let go; backward gathers them
again, so what is kept are pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from armillary.tensor.collectives import SumForward, applied
from armillary.tensor.groups import MeshAxis

__all__ = ["ColumnLinear", "GatheredLinear", "Gathering", "RowLinear", "is_cut", "marked_cut"]

CUT = "_armillary_is_cut"  # an attribute of tensors, since only the model knows where they go


def is_cut(x: Any) -> bool:
    """Whether an activation stands between a column and a row layer."""
    return getattr(x, CUT, False)


def marked_cut(x: Tensor, as_cut: bool = True) -> Tensor:
    setattr(x, CUT, as_cut)
    return x


class ColumnLinear(nn.Linear):
    """Outputs are cut; `_copied` gives the input so that its gradient is summed."""

    _copied: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return marked_cut(functional.linear(self._copied(x), self.weight, self.bias))


class RowLinear(nn.Linear):
    """Inputs are cut; the bias is added once, behind the sum."""

    _axis: MeshAxis

    def forward(self, x: Tensor) -> Tensor:
        y = marked_cut(applied(SumForward, functional.linear(x, self.weight), self._axis), False)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Gathering:
    """Over which axes, and along which dimension of the activation. scatter: None where outputs are whole sums."""

    x: MeshAxis
    x_dim: int
    weight: MeshAxis
    scatter: MeshAxis | None
    rows_dim: int
    sum_weight: tuple[MeshAxis, ...]
    sum_bias: tuple[MeshAxis, ...]


class GatheredLinear(nn.Linear):
    """Input, weight and output are cut."""

    _gathering: Gathering

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
        return applied(_Gathered, x, weight, bias, self._gathering)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Gathering) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by, ctx.has_bias = by, bias is not None
        y = functional.linear(by.x.gather(x, by.x_dim), by.weight.gather(weight, 1))
        if by.scatter is not None:
            y = by.scatter.scatter_sum(y, by.rows_dim)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        by: Gathering = ctx.by
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = dy.flatten(0, -2).sum(0)
            for axis in by.sum_bias:
                dbias = axis.sum(dbias)
        if by.scatter is not None:
            dy = by.scatter.gather(dy, by.rows_dim)
        if ctx.needs_input_grad[0]:
            dx = by.x.scatter_sum(dy @ by.weight.gather(weight, 1), by.x_dim)
        if ctx.needs_input_grad[1]:
            whole = by.x.gather(x, by.x_dim)
            dweight = by.weight.scatter_sum(dy.flatten(0, -2).t() @ whole.flatten(0, -2), 1)
            for axis in by.sum_weight:
                dweight = axis.sum(dweight)
        return dx, dweight, dbias, None
