"""A small vision transformer, as a sequence of its parts.

Source: Dosovitskiy et al., ICLR 2021. Departures: patches are averaged at the end instead of read off a class
token (Beyer et al., 2022), and there is no dropout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Patches", "vit"]


class Patches(nn.Module):
    """Images (images, 1, side, side) to patch vectors (images, patches, width) with learned positions."""

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        vectors: Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return vectors + self.positions


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its normed input's origin (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, vectors: Tensor) -> Tensor:
        images, patches, width = vectors.shape
        split = self.queries_keys_values(self.norm_attention(vectors))
        split = split.view(images, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(0)).transpose(1, 2).reshape(vectors.shape)
        vectors = vectors + self.projection(attended)
        out: Tensor = vectors + self.perceptron(self.norm_perceptron(vectors))
        return out


class Mean(nn.Module):
    """The average over the patches."""

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors.mean(1)


def vit(side: int, classes: int, width: int, depth: int) -> nn.Sequential:
    """Images (images, 1, side, side) in, scores (images, classes) out; heads of 16, 8 x 8 patches, or
    fewer if they would be smaller than 2 x 2 pixels."""
    patch = max(2, side // 8)
    if side % patch or width % 16:
        raise ValueError(f"vit: side {side} must be a multiple of {patch} and width {width} of 16")
    blocks = [Block(width, width // 16) for _ in range(depth)]
    return nn.Sequential(Patches(side, patch, width), *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, classes))
