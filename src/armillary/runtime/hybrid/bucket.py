"""The gradients of one dense group side by side in one flat tensor, so that they cross the workers in one exchange.

Behind the gradients stands one number per parameter, 1 where this rank used it: their sums tell a parameter that no
rank used (its gradient stays None) from one that some did (the others count as zero). With the mean over weights, one
more number carries the weight of this rank's batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Bucket"]


class Bucket:
    """Begins a backward empty (`reset`), takes each gradient as it appears (`deposit`), gives back the mean
    (`withdraw`)."""

    def __init__(self, parameters: Sequence[nn.Parameter], is_weighted: bool = False):
        self.parameters, self.is_weighted = list(parameters), is_weighted
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        extra = len(self.parameters) + is_weighted
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.used = self.flat[numel : numel + len(self.parameters)]
        self.weight = self.flat[numel + len(self.parameters) :]  # (1,) or (0,)
        pieces = self.flat[:numel].split([parameter.numel() for parameter in self.parameters])
        self.views = [_laid_out_as(p, piece) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.waiting = set(range(len(self.parameters)))

    def reset(self) -> None:
        """A backward begins: every parameter is waited for."""
        self.waiting = set(range(len(self.parameters)))

    @property
    def is_ready(self) -> bool:
        return not self.waiting

    def deposit(self, index: int, scale: float) -> None:
        """Puts scale * gradient of that parameter in its place; its `.grad` becomes the view."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.data_ptr() == view.data_ptr():
            view.mul_(scale)
        else:
            torch.mul(gradient.detach(), scale, out=view)
            parameter.grad = view
        self.waiting.discard(index)

    def seal(self, scale: float, weight: float, counts: bool = True) -> Tensor:
        """The flat tensor to send. Parameters that got no gradient in this backward count as what they hold, or
        zero; a rank that does not count uses none."""
        self.used.fill_(float(counts))
        for index in sorted(self.waiting):
            if self.parameters[index].grad is None:
                self.views[index].zero_()
                self.used[index] = 0
            else:  # gradients accumulated earlier without an exchange
                self.deposit(index, scale)
        if self.is_weighted:
            self.weight.fill_(weight)
        return self.flat

    def withdraw(self, total: Tensor) -> None:
        """Takes the exchanged flat tensor: `.grad` of every parameter that some rank used becomes final."""
        if total.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(total)
        if self.is_weighted:
            weight = float(self.weight.real)
            self.flat.div_(weight if weight > 0 else 1.0)
        for parameter, view, used in zip(self.parameters, self.views, self.used.real.tolist(), strict=True):
            parameter.grad = view if used > 0 else None


def _laid_out_as(parameter: Tensor, piece: Tensor) -> Tensor:
    """The flat piece in the parameter's shape, and in its strides where these leave no gap: fused optimizers walk over
    weight and gradient in the order of memory."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)
