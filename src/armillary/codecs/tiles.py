"""Numbers in tiles of one length, and small whole numbers packed into bytes: what several codecs stand on.

A tile never takes part of its scale from another: so pieces cut between tiles are coded as the whole is, bit for bit.
Scales of 16-bit numbers are taken in float32, or they would be as coarse as the numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "Tiles",
    "as_bytes",
    "from_bytes",
    "in_blocks",
    "packed",
    "packed_bytes",
    "scale_bytes",
    "tiled",
    "unpacked",
    "within",
    "working",
]

BLOCK = 1 << 16  # numbers
Tiles = Tensor  # (tiles, tile): the numbers, and zeros behind them where they do not fill the last tile


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales are taken."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def scale_bytes(item_bytes: int) -> int:
    """Of one scale of numbers of so many bytes each."""
    return max(4, item_bytes)


def within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype; what is finite but beyond its largest number becomes that, with its sign."""
    exact = values.to(working(values.dtype))
    most = min(torch.finfo(dtype).max, torch.finfo(exact.dtype).max)
    return torch.where(exact.isfinite(), exact.clamp(-most, most), exact).to(dtype)


def tiled(values: Tensor, tile: int) -> Tiles:
    """(n,) -> (ceil(n / tile), tile), the dtype kept."""
    missing = -len(values) % tile
    return torch.nn.functional.pad(values, (0, missing)).view(-1, tile)


def in_blocks(rows: Tensor, tile: int) -> Sequence[Tensor]:
    """(tiles, any) -> the same rows, those of as many tiles together as a core's cache holds through several passes.

    Of two million numbers that saves a third of the time: memory is read once, and no large tensor comes and goes.

    Args:
        rows: one for each tile: its numbers, or what belongs to them. tile: numbers of a tile.
    """
    found: Sequence[Tensor] = rows.split(max(1, BLOCK // tile))
    return found


def as_bytes(values: Tensor) -> Tensor:
    """(n,) -> (n * itemsize,) uint8."""
    return values.contiguous().view(torch.uint8)


def from_bytes(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes it, wherever in a message the bytes stand: a view of a dtype wants aligned ones, so they are copied."""
    return code.clone(memory_format=torch.contiguous_format).view(dtype)


def packed_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """(n,) uint8 below 2 ** bits -> bytes, the first number in the lowest bits; bits: 1, 2, 4 or 8."""
    each = 8 // bits
    columns = tiled(numbers, each)
    code = columns[:, 0].clone()
    for place in range(1, each):
        code |= columns[:, place] << (place * bits)
    return code


def unpacked(code: Tensor, n: int, bits: int) -> Tensor:
    """Undoes it: -> (n,) uint8."""
    shifted = [code >> (place * bits) for place in range(8 // bits)]
    return torch.stack(shifted, 1).bitwise_and_((1 << bits) - 1).view(-1)[:n]
