"""Numbers as whole multiples of the largest of their tile: 8, 4 or 2 bits each, and one scale a tile.

The largest number of a tile is kept exactly, the others are rounded to the nearest of 2 ** bits - 1 levels between it
and its negative.

Source: QSGD (Alistarh et al., 2017) and its block-wise kin. Departures: rounding to the nearest, since error feedback
sends later what is left out; and the code holds the tile's largest number instead of the step between levels, which
could vanish or overflow where the number does not.
"""

from dataclasses import replace

import torch
from torch import Tensor

from armillary.codecs.packing import (
    as_bytes,
    from_bytes,
    in_blocks,
    packed,
    packed_bytes,
    scale_bytes,
    tiled,
    unpacked,
    working,
)
from armillary.codecs.registry import Codec, Draw, codec
from armillary.plans.advice import ONE_STAGE, Advice, Combination, Situation, advises, not_for, planned

__all__ = ["quantize"]

BITS = (8, 4, 2)


@codec(
    {"bits": 8}, {"bits": 4}, {"bits": 2}, {"bits": 8, "tile": 64},
    offers=({"bits": 8}, {"bits": 4}), mildness=2, costs="gradients are rounded; what is left out is sent later",
    aliases={"int8": {"bits": 8}, "int4": {"bits": 4}},
)  # fmt: skip
def quantize(bits: int = 8, tile: int = 256) -> Codec:
    """
    Args:
        bits: of a number: 8, 4 or 2.
        tile: numbers that share a scale, a power of two.

    Raises:
        ValueError: other bits, or another tile.
    """
    if bits not in BITS:
        raise ValueError(f"codec: quantize knows 8, 4 and 2 bits, got {bits!r}")
    if not isinstance(tile, int) or tile < 8 or tile & (tile - 1):
        raise ValueError(f"codec: quantize wants tiles of 8, 16, 32, ... numbers, got {tile!r}")
    levels = (1 << (bits - 1)) - 1
    lowest = levels if bits < 8 else 0  # what makes whole numbers positive, to be packed; a byte has a sign of its own

    def encode(values: Tensor, draw: Draw) -> Tensor:
        blocks, tops = in_blocks(values, tile), list[Tensor]()
        rows = [len(some) for some in blocks]
        numbers = values.new_empty(sum(rows), tile, dtype=torch.int8)  # thrice as fast to make as unsigned ones
        for some, number in zip(blocks, numbers.split(rows), strict=True):
            exact = some.to(working(values.dtype))
            tops.append(exact.abs().amax(1, keepdim=True))
            steps = exact / torch.where(tops[-1] > 0, tops[-1], 1)
            number.copy_(steps.mul_(levels).round_().nan_to_num_(0.0))
        counted = numbers.view(-1)[: len(values)]
        counted = counted.add_(lowest) if lowest else counted
        return torch.cat([*(as_bytes(top.view(-1)) for top in tops), packed(counted.view(torch.uint8), bits)])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        dtype = working(like.dtype)
        at = -(-n // tile) * dtype.itemsize
        blocks = in_blocks(unpacked(code[at:], n, bits).view(torch.int8), tile)
        rows = [len(some) for some in blocks]
        tops = from_bytes(code[:at], dtype).view(-1, 1)
        found = code.new_empty(sum(rows), tile, dtype=dtype)
        for some, top, block in zip(blocks, tops.split(rows), found.split(rows), strict=True):
            block.copy_(some)
            if lowest:
                block.sub_(lowest)
            block.div_(levels).mul_(top)
        return found.view(-1)[:n].to(like.dtype)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        exact, found = values.to(working(values.dtype)), []
        for piece in exact.split(tile) if len(exact) else ():
            top = piece.abs().max()
            steps = torch.round(piece / top * levels) if top > 0 else torch.zeros_like(piece)
            found.append(steps / levels * top)
        return torch.cat(found).to(values.dtype) if found else values.clone()

    def coded_bytes(n: int, item_bytes: int) -> int:
        return -(-n // tile) * scale_bytes(item_bytes) + packed_bytes(n, bits)

    def bound(values: Tensor) -> Tensor:
        top = tiled(values.double(), tile).abs().amax(1, keepdim=True)
        rounding = 0.5 / levels + 4 * torch.finfo(values.dtype).eps
        smallest = torch.finfo(values.dtype).smallest_normal * torch.finfo(values.dtype).eps
        return (top * rounding + 2 * smallest).expand(-1, tile).reshape(-1)[: len(values)]

    return Codec(encode, decode, meaning, coded_bytes, bound, is_biased=True, align=tile, work=4.0)


@advises("int8", "gradients in a byte a number", "methods/codecs.md")
def _gradients(situation: Situation) -> Advice:
    found = planned(situation, "a byte a number", "--exchange 'int8=*'", {"*": "int8"})
    by_row = [group.name for group in situation.chosen.plan.groups if group.layout == "row_sharded"]
    if not (found.applies and found.forecast and by_row):
        return found
    name = "tables by row + int8 for the rest"
    both = Combination(name, found.forecast, found.departures, found.shell, found.python)
    return replace(found, combinations=(both,))


@advises("activation compression", "what pipeline stages hand on, in a byte a number", "methods/edges.md")
def _edges(situation: Situation) -> Advice:
    if situation.pipeline is None and situation.workers > 1:
        return not_for("no pipeline cuts this model" if situation.stage_counts else ONE_STAGE)
    schedule = situation.pipeline
    return planned(situation, "a byte a number", f"--schedule '{schedule}' --edge int8", schedule=schedule, edge="int8")
