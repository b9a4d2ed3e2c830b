"""The sign of every number, and the mean size of a tile's numbers: one bit a number.

Source: 1-bit SGD (Seide et al., 2014). Departure: the mean is taken over numbers that are not zero, so that zeros
behind a short tensor do not make it small; and there is one scale for both signs.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import (
    Tiles,
    as_bytes,
    from_bytes,
    packed,
    packed_bytes,
    scale_bytes,
    tiled,
    unpacked,
    working,
)
from armillary.codecs.registry import Codec, Draw, codec

__all__ = ["one_bit"]


@codec(
    {}, {"tile": 64}, offers=({},), mildness=6, costs="of gradients only signs go at once; the rest is sent later"
)  # fmt: skip
def one_bit(tile: int = 256) -> Codec:
    """
    Args:
        tile: numbers that share a scale, a power of two.

    Raises:
        ValueError: another tile.
    """
    if not isinstance(tile, int) or tile < 8 or tile & (tile - 1):
        raise ValueError(f"codec: one_bit wants tiles of 8, 16, 32, ... numbers, got {tile!r}")

    def sizes(tiles: Tiles) -> Tensor:
        """(tiles, 1): the mean size of numbers that are not zero. Halves are added to halves: the same order of sums
        however many tiles there are."""
        count = tiles.count_nonzero(1).clamp(min=1).unsqueeze(1)
        part = tiles.abs() / count
        while part.shape[1] > 1:
            half = part.shape[1] // 2
            part = part[:, :half] + part[:, half:]
        return torch.where(part.isinf(), tiles.abs().amax(1, keepdim=True), part)

    def encode(values: Tensor, draw: Draw) -> Tensor:
        tiles = tiled(values, tile).to(working(values.dtype))
        signs = (tiles >= 0).to(torch.uint8).view(-1)[: len(values)]
        return torch.cat([as_bytes(sizes(tiles).view(-1)), packed(signs, 1)])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        dtype = working(like.dtype)
        at = -(-n // tile) * dtype.itemsize
        signs = tiled(unpacked(code[at:], n, 1).to(dtype) * 2 - 1, tile)
        return (signs * from_bytes(code[:at], dtype).view(-1, 1)).view(-1)[:n].to(like.dtype)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        tiles = tiled(values, tile).to(working(values.dtype))
        size = sizes(tiles)
        return torch.where(tiles >= 0, size, -size).view(-1)[: len(values)].to(values.dtype)

    def coded_bytes(n: int, item_bytes: int) -> int:
        return -(-n // tile) * scale_bytes(item_bytes) + packed_bytes(n, 1)

    def bound(values: Tensor) -> Tensor:
        tiles = tiled(values.double(), tile)
        mean = tiles.abs().sum(1, keepdim=True) / tiles.count_nonzero(1).clamp(min=1).unsqueeze(1)
        limits = torch.finfo(values.dtype)
        size = mean * (1 + 16 * limits.eps) + limits.smallest_normal * limits.eps
        return torch.maximum(tiles.abs(), size).view(-1)[: len(values)]

    return Codec(encode, decode, meaning, coded_bytes, bound, is_biased=True, align=tile, work=6.0)
