"""LayerNorm and RMSNorm where each rank holds a piece of the features: moments are summed over the axis."""

import torch
from torch import Tensor, nn

from armillary.tensor.collectives import own_gradient, sum_backward, sum_both
from armillary.tensor.groups import MeshAxis

__all__ = ["CutLayerNorm", "CutRMSNorm"]


class CutLayerNorm(nn.LayerNorm):
    """Mean first, then variance: two sums a row each way, and no cancellation."""

    _features: MeshAxis
    _alike: tuple[MeshAxis, ...]

    def forward(self, x: Tensor) -> Tensor:
        wide = self.normalized_shape[0]
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

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        square = sum_both(x.square().sum(-1, keepdim=True), self._features) / self.normalized_shape[0]
        x = x * torch.rsqrt(square + eps)
        return x if self.weight is None else x * sum_backward(self.weight, self._alike)
