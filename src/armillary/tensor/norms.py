"""LayerNorm and RMSNorm where each rank holds a piece of the features: moments are summed over the axis."""

import torch
from torch import Tensor, nn

from armillary.tensor.collectives import own_gradient, sum_backward, sum_both
from armillary.tensor.groups import MeshAxis
from armillary.tensor.linear import is_cut

__all__ = ["CutLayerNorm", "CutRMSNorm"]


def _refuse_other_features(wide: int, x: Tensor, axis: MeshAxis, fits_between: bool) -> None:
    """
    Raises:
        ValueError: the axis does not cut what is normalized.
    """
    if x.shape[-1] * axis.size != wide or (is_cut(x) and not fits_between):
        raise ValueError(
            f"tensor: a norm of {wide} features inside a region read {tuple(x.shape)}, of which {axis.name!r} does not "
            'cut the features; way="columns_rows" takes norms of heads, "2d" norms between two linear layers'
        )


class CutLayerNorm(nn.LayerNorm):
    """Mean first, then variance: two sums a row each way, and no cancellation. fits_between: the same axis cuts the
    features between a column and a row layer."""

    _features: MeshAxis
    _alike: tuple[MeshAxis, ...]
    _fits_between: bool

    def forward(self, x: Tensor) -> Tensor:
        wide = self.normalized_shape[0]
        _refuse_other_features(wide, x, self._features, self._fits_between)
        x = x - sum_both(x.sum(-1, keepdim=True), self._features) / wide
        variance = sum_both(x.square().sum(-1, keepdim=True), self._features) / wide
        x = x * torch.rsqrt(variance + self.eps)
        own = [own_gradient(one) for one in (self.weight, self.bias) if one is not None]
        if not own:
            return x
        weight, *bias = sum_backward(torch.stack(own), self._alike).unbind()  # one sum of both gradients
        return x * weight + bias[0] if bias else x * weight


class CutRMSNorm(nn.RMSNorm):
    """One sum a row each way."""

    _features: MeshAxis
    _alike: tuple[MeshAxis, ...]
    _fits_between: bool

    def forward(self, x: Tensor) -> Tensor:
        _refuse_other_features(self.normalized_shape[0], x, self._features, self._fits_between)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        square = sum_both(x.square().sum(-1, keepdim=True), self._features) / self.normalized_shape[0]
        x = x * torch.rsqrt(square + eps)
        return x if self.weight is None else x * sum_backward(self.weight, self._alike)
