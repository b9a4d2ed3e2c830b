"""Another codec on rotated numbers: a rotation spreads a large number over its tile, so that a scale fits them all.

Tiles of 64 numbers get fixed signs and are multiplied by a Hadamard matrix / 8, which is its own inverse. It is made in
six passes of sums and differences: the same bits for a tile wherever it stands.

Source: QuIP# and TAH-Quant's rotation before tile-wise quantisation. Departure: no pivot is swapped out.
"""

import math

import torch
from torch import Tensor

from armillary.codecs.packing import BLOCK, Tiles, bounded, tiled, within, working
from armillary.codecs.registry import Codec, Draw, codec, codec_of
from armillary.plans.registry import Choice

__all__ = ["hadamard", "rotated"]

TILE = 64


def _signs(like: Tensor) -> Tensor:
    drawn = torch.randint(0, 2, (TILE,), generator=torch.Generator().manual_seed(1867))
    return (2 * drawn - 1).to(like)


def rotated(tiles: Tiles) -> Tiles:
    """Every tile times H / 8. Divided by 64 first, which is exact, so that no sum overflows; what is beyond the largest
    number in the end becomes that."""
    found = [_rotated(some) for some in tiles.split(BLOCK // TILE)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _rotated(tiles: Tiles) -> Tiles:
    """Numbers of one place in all tiles lie side by side meanwhile: so every pass goes through memory in order."""
    width, found = 1, (tiles / TILE).t().contiguous()
    while width < TILE:
        upper, lower = found.view(TILE // (2 * width), 2, width, -1).unbind(1)
        difference = upper - lower
        upper.add_(lower)
        lower.copy_(difference)
        width *= 2
    most = torch.finfo(found.dtype).max / 8
    return bounded(found, most).mul_(8).t().contiguous()


@codec(
    {"of": Choice("quantize", {"bits": 4})}, {"of": Choice("quantize", {"bits": 8, "tile": 64})}, {"of": "one_bit"},
    offers=({"of": Choice("quantize", {"bits": 4})},), mildness=3,
    costs="gradients are rotated and rounded; what is left out is sent later",
)  # fmt: skip
def hadamard(of: Choice | str) -> Codec:
    """
    Args:
        of: the codec of the rotated numbers.

    Raises:
        ValueError: no such codec.
    """
    inner = codec_of(of)

    def turned(values: Tensor) -> Tensor:
        """(n,) -> (whole tiles,), rotated."""
        tiles = tiled(values, TILE).to(working(values.dtype))
        return rotated(tiles * _signs(tiles)).view(-1)

    def back(values: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        tiles = rotated(values.view(-1, TILE))
        return within((tiles * _signs(tiles)).view(-1)[:n], dtype)

    def whole(n: int) -> int:
        return -(-n // TILE) * TILE

    def encode(values: Tensor, draw: Draw) -> Tensor:
        return inner.encode(turned(values), draw)

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=working(like.dtype), device=like.device)
        return back(inner.decode(code, whole(n), empty), n, like.dtype)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        return back(inner.meaning(turned(values), draw), len(values), values.dtype)

    def coded_bytes(n: int, item_bytes: int) -> int:
        return inner.coded_bytes(whole(n), max(4, item_bytes))

    def likely_bytes(n: int, item_bytes: int) -> int:
        return inner.expected_bytes(whole(n), max(4, item_bytes))

    def bound(values: Tensor) -> Tensor:
        """A rotation keeps the norm of a tile's error."""
        spun = turned(values)
        exact = tiled(values.double(), TILE)
        norm = exact.norm(dim=1, keepdim=True)
        beyond = (rotated(exact * _signs(exact)).view(-1) - spun.double()).abs()
        error = tiled(inner.bound(spun) + beyond, TILE).norm(dim=1, keepdim=True)
        limits = torch.finfo(values.dtype)
        error += (norm + error) * 32 * limits.eps + TILE * limits.smallest_normal
        each: Tensor = error.expand(-1, TILE).reshape(-1)
        return each[: len(values)]

    align = 0 if inner.align == 0 else math.lcm(TILE, inner.align)
    return inner._replace(
        encode=encode, decode=decode, meaning=meaning, coded_bytes=coded_bytes, bound=bound, align=align,
        work=inner.work + 25.0,
        keeps=inner.keeps,
        places=None,
        likely_bytes=likely_bytes,
    )  # fmt: skip
