"""MADE, the masked autoencoder: one pass gives the odds of every pixel from the pixels before it.

Germain, Gregor, Murray and Larochelle, MADE: Masked Autoencoder for Distribution Estimation, ICML 2015. Hidden units
are sorted by degree, so what a part of the pixels needs is the front of each layer. The output also sees the pixels
directly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.solvers.system import Step

__all__ = ["Made"]


class Made(nn.Module):
    """Two hidden layers of `width` units; (n, T) pixels of 0 .. levels-1 give (n, T, levels) logits."""

    mask_1: Tensor
    mask_2: Tensor
    mask_out: Tensor
    mask_skip: Tensor

    def __init__(self, unknowns: int, levels: int, width: int = 512) -> None:
        super().__init__()
        if unknowns < 1 or levels < 2 or width < 1:
            raise ValueError(f"Made: want pixels, 2 levels or more and a width, got {unknowns}, {levels}, {width}")
        self.unknowns, self.levels = unknowns, levels
        number = torch.arange(1, unknowns + 1)
        degree = torch.arange(width) * max(unknowns - 1, 1) // width + 1  # of a unit: it sees pixels 1 .. degree
        self.hidden_1, self.hidden_2 = nn.Linear(unknowns, width), nn.Linear(width, width)
        self.out, self.skip = nn.Linear(width, unknowns * levels), nn.Linear(unknowns, unknowns * levels, bias=False)
        self.register_buffer("mask_1", degree[:, None] >= number)
        self.register_buffer("mask_2", degree[:, None] >= degree)
        self.register_buffer("mask_out", number[:, None, None] > degree)
        self.register_buffer("mask_skip", number[:, None, None] > number)
        self.needed = [0, *torch.searchsorted(degree, number, right=True).tolist()]  # units that see pixels 1 .. t only

    def forward(self, pixels: Tensor) -> Tensor:
        return self.outputs_at(pixels, slice(0, self.unknowns))

    def outputs_at(self, pixels: Tensor, at: slice) -> Tensor:
        """Logits of the pixels in the slice alone: (n, len, levels)."""
        last = max(range(self.unknowns)[at], default=0)  # what it needs are pixels and units before this one
        units, x = self.needed[last], self._scaled(pixels[:, :last])
        first, second, skip, out = self.hidden_1, self.hidden_2, self._by_pixel(self.skip), self._by_pixel(self.out)
        h = F.relu(F.linear(x, (first.weight * self.mask_1)[:units, :last], first.bias[:units]))
        h = F.relu(F.linear(h, (second.weight[:units, :units] * self.mask_2[:units, :units]), second.bias[:units]))
        seen = F.linear(x, (skip[at, :, :last] * self.mask_skip[at, :, :last]).flatten(0, 1))
        logits = F.linear(h, (out[at, :, :units] * self.mask_out[at, :, :units]).flatten(0, 1)) + seen
        found: Tensor = logits.unflatten(1, (-1, self.levels)) + self._by_pixel(self.out.bias)[at]
        return found

    def incremental(self, samples: int) -> Step:
        """A loop in order that computes only what the last pixel makes new, and keeps the rest.

        Returns:
            step(t, pixel t-1 of all samples, None before the first) -> (samples, levels) logits of pixel t.
        """
        first, second = self.hidden_1.weight * self.mask_1, self.hidden_2.weight * self.mask_2
        out, skip = self._by_pixel(self.out) * self.mask_out, self._by_pixel(self.skip) * self.mask_skip
        x = first.new_zeros(samples, self.unknowns)
        h_1, h_2 = (first.new_zeros(samples, len(first)) for _ in range(2))

        def step(t: int, last: Tensor | None) -> Tensor:
            units = self.needed[t]
            if last is not None:
                x[:, t - 1] = self._scaled(last)
                new = slice(self.needed[t - 1], units)
                h_1[:, new] = F.relu(F.linear(x[:, :t], first[new, :t], self.hidden_1.bias[new]))
                h_2[:, new] = F.relu(F.linear(h_1[:, :units], second[new, :units], self.hidden_2.bias[new]))
            seen = F.linear(x[:, :t], skip[t, :, :t], self._by_pixel(self.out.bias)[t])
            return seen + F.linear(h_2[:, :units], out[t, :, :units])

        return step

    def _scaled(self, pixels: Tensor) -> Tensor:
        return pixels.to(self.out.weight.dtype) / (self.levels - 1) * 2 - 1

    def _by_pixel(self, of: nn.Linear | Tensor) -> Tensor:
        weight: Tensor = of.weight if isinstance(of, nn.Linear) else of
        return weight.view(self.unknowns, self.levels, *weight.shape[1:])
