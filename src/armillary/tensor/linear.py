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

from armillary.tensor.collectives import applied, sum_forward
from armillary.tensor.groups import Later, MeshAxis

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
        with torch._C.DisableTorchFunction():  # the region sums gradients of what meets a piece; these are pieces
            return marked_cut(functional.linear(self._copied(x), self.weight, self.bias))


class RowLinear(nn.Linear):
    """Inputs are cut; the bias is added once, behind the sum."""

    _axis: MeshAxis

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            y = marked_cut(sum_forward(functional.linear(x, self.weight), self._axis), False)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Gathering:
    """Over which axes, and along which dimension of the activation. scatter: None where outputs are whole sums.
    is_column: a row layer comes behind it."""

    is_column: bool
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
        return marked_cut(applied(_Gathered, x, weight, bias, self._gathering), self._gathering.is_column)


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Gathering) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by, ctx.has_bias = by, bias is not None
        whole, used = by.x.gathering(x, by.x_dim), by.weight.gathering(weight, 1)
        y = functional.linear(whole(), used())
        if by.scatter is not None:
            y = by.scatter.scatter_summing(y, by.rows_dim)()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Requests that do not need one another are under way together: on slow links each costs its latency."""
        by: Gathering = ctx.by
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx: Later | None = None
        dweight, dbias, whole, used = dx, dx, dx, dx
        if needs_x:
            used = by.weight.gathering(weight, 1)
        if needs_weight:
            whole = by.x.gathering(x, by.x_dim)
        if ctx.has_bias and needs_bias:
            dbias = by.sum_bias[0].summing(dy.flatten(0, -2).sum(0))
        if by.scatter is not None:
            dy = by.scatter.gather(dy, by.rows_dim)
        if used is not None:
            dx = by.x.scatter_summing(dy @ used(), by.x_dim)
        if whole is not None:
            dweight = by.weight.scatter_summing(dy.flatten(0, -2).t() @ whole().flatten(0, -2), 1)
        dbias, dweight = _summed(dbias, by.sum_bias[1:]), _summed(dweight, by.sum_weight)
        return *(None if one is None else one() for one in (dx, dweight, dbias)), None


def _summed(gradient: Later | None, axes: tuple[MeshAxis, ...]) -> Later | None:
    if gradient is None:
        return None
    for axis in axes:
        gradient = axis.summing(gradient())
    return gradient
