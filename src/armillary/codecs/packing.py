"""What several codecs stand on: tiles of one length, numbers packed into bytes, a choice of a few in every chunk.

A tile never takes part of its scale from another, so pieces cut between tiles are coded as the whole is, bit for bit.
Scales of 16-bit numbers are taken in float32, or they would be as coarse as the numbers. Choosing in chunks instead of
over all numbers keeps the size fixed, and takes a fifth of the time.

Whether all numbers are finite is seen from the smallest and the largest, in one pass. `isfinite().all()` took fifteen
times as long, a sixth of a low-rank push.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "Chunks",
    "Tiles",
    "all_finite",
    "as_bytes",
    "bounded",
    "chunks_of",
    "from_bytes",
    "in_blocks",
    "ones_among",
    "packed",
    "packed_bytes",
    "scale_bytes",
    "tiled",
    "unpacked",
    "within",
    "working",
]

BLOCK = 1 << 18  # numbers: of fewer, slow cores spend more on calls than they save on memory
Tiles = Tensor  # (tiles, tile): the numbers, and zeros behind them where they do not fill the last tile


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales are taken."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def scale_bytes(item_bytes: int) -> int:
    """Of one scale of numbers of so many bytes each."""
    return max(4, item_bytes)


def within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype; what is finite but beyond its largest number becomes that, with its sign; what is infinite, not a
    number."""
    if torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return values.to(dtype)
    exact = values.to(working(values.dtype))
    return bounded(exact, torch.finfo(dtype).max).to(dtype)


def bounded(values: Tensor, most: float) -> Tensor:
    """None larger than `most`; what is infinite is not a number then: to look for it and leave it takes ten times as
    long."""
    return (values * 0).add_(values.clamp(-most, most))


def tiled(values: Tensor, tile: int) -> Tiles:
    """(n,) -> (ceil(n / tile), tile), the dtype kept."""
    missing = -len(values) % tile
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).reshape(-1, tile)


def in_blocks(values: Tensor, tile: int) -> list[Tiles]:
    """(n,) -> the same numbers in tiles, of as many together as a core's cache holds through several passes.

    Of two million numbers that saves a third of the time: memory is read once, and no large tensor comes and goes.
    Whole tiles are views.
    """
    whole = len(values) // tile * tile
    found = list(values[:whole].reshape(-1, tile).split(max(1, BLOCK // tile))) if whole else []
    return [*found, tiled(values[whole:], tile)] if whole < len(values) else found


def as_bytes(values: Tensor) -> Tensor:
    """(n,) -> (n * itemsize,) uint8."""
    return values.contiguous().view(torch.uint8)


def from_bytes(code: Tensor, dtype: torch.dtype) -> Tensor:
    """Undoes it, wherever in a message the bytes stand: a view of a dtype wants aligned ones, so they are copied."""
    return code.clone(memory_format=torch.contiguous_format).view(dtype)


def ones_among(marks: Tensor) -> Tensor:
    """(8 * m,) bytes -> (count,) int64, rising: where one is not zero. Eight are looked at together first: if few are
    set, that takes half the time."""
    words = marks.view(torch.int64)
    which = words.nonzero().view(-1)
    inside = words.index_select(0, which).view(torch.int8).nonzero().view(-1)
    return which.index_select(0, inside >> 3).mul_(8).add_(inside & 7)


def packed_bytes(n: int, bits: int) -> int:
    return -(-n * bits // 8)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """(n,) uint8 below 2 ** bits -> bytes, the first number in the lowest bits; bits: 1, 2, 4 or 8."""
    if bits == 8:
        return numbers
    each = 8 // bits
    columns = tiled(numbers, each)
    code = columns[:, 0].clone()
    for place in range(1, each):
        code |= columns[:, place] << (place * bits)
    return code


def unpacked(code: Tensor, n: int, bits: int) -> Tensor:
    """Undoes it: -> (n,) uint8."""
    if bits == 8:
        return code[:n]
    return _held(bits).to(code.device).index_select(0, code.int()).view(torch.uint8)[:n]


@cache
def _held(bits: int) -> Tensor:
    """(256,): the numbers in each byte, a byte for each of them, together one whole number: to look it up takes a fifth
    of the time of shifting."""
    shifts = torch.arange(0, 8, bits)
    numbers = torch.arange(256).unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    wide = {2: torch.int16, 4: torch.int32, 8: torch.int64}[len(shifts)]
    return numbers.to(torch.uint8).view(wide).view(-1)


@dataclass(frozen=True)
class Chunks:
    """`count` numbers of every `chunk`."""

    chunk: int
    count: int

    @property
    def share(self) -> float:
        return self.count / self.chunk

    def number(self, n: int) -> int:
        """How many chunks n numbers fill; the last may be short."""
        return -(-n // self.chunk)

    def kept(self, n: int) -> int:
        """Of n numbers, how many stand in the code; zeros behind a short chunk may be among them."""
        return self.number(n) * self.count

    def gathered(self, values: Tensor, places: Tensor) -> Tensor:
        """places (chunks, count) within their chunks -> the numbers there, (chunks * count,)."""
        return tiled(values, self.chunk).gather(1, places).view(-1)

    def spread(self, kept: Tensor, places: Tensor, n: int) -> Tensor:
        """Undoes it: (n,), zeros elsewhere."""
        full = torch.zeros(len(places), self.chunk, dtype=kept.dtype, device=kept.device)
        return full.scatter(1, places, kept.view_as(places)).view(-1)[:n]

    def __str__(self) -> str:
        return f"{self.count} of every {self.chunk} numbers at once, {self.share:.3g} of all"


def chunks_of(who: str, keep: float, chunk: int) -> Chunks:
    """ceil(keep * chunk) of every chunk; 0: of round(1 / keep) numbers.

    Raises:
        ValueError: a share outside (0, 1], or a negative chunk.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"codec: {who} keeps a share above 0 and at most 1, got {keep!r}")
    if not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"codec: {who} wants chunks of 1 number or more, or 0 for round(1 / keep), got {chunk!r}")
    length = chunk or round(1 / keep)
    return Chunks(length, max(1, math.ceil(keep * length - 1e-9)))


def all_finite(values: Tensor) -> Tensor:
    """() bool. values: dense, of any shape; of none it is True."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, most = (torch.view_as_real(values) if values.is_complex() else values).aminmax()
    return least.isfinite() & most.isfinite()
