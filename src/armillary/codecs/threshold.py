"""The numbers that reach a threshold, and where they stand; the threshold is a quantile of the sizes.

Source: dynamic communication thresholding (Gupta et al., KDD 2021). Places travel as the shortest of three forms at
their count: one bit a number, two bytes a place, or all numbers without places. Zeros are never sent. Departure: a
place is told within a page of 65,536 numbers, with how many places each page but the last has.
"""

import math

import torch
from torch import Tensor

from armillary.codecs.packing import as_bytes, from_bytes, ones_among, packed_bytes, unpacked
from armillary.codecs.registry import Codec, Draw, codec

__all__ = [
    "add_sparse", "from_sparse", "most_bytes", "places_above", "quantile", "sparse", "sparse_bytes",
    "threshold",
]  # fmt: skip

PLACES, BITMAP, ALL = range(3)
PAGE = 1 << 16  # numbers whose places two bytes tell apart
PAGE_BYTES, PLACE_BYTES = 4, 2
EXACT = 1 << 16  # numbers up to which the quantile is exact
SAMPLE = 20_000
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, less what is whole, fill the unit interval evenly


def quantile(values: Tensor, sparsity: float) -> Tensor:
    """(): the size that a share 1 - sparsity of the values reaches; of more than 65,536, that of a sample."""
    if not len(values):
        return values.new_zeros(())
    size = (values if len(values) <= EXACT else values[_sample(len(values)).to(values.device)]).abs()
    count = max(1, round((1 - sparsity) * len(size)))
    return size.kthvalue(len(size) - count + 1).values


def _sample(n: int) -> Tensor:
    """(SAMPLE,) int64: places among n, the same every time, all columns of a matrix of n numbers alike: a stride of
    n / SAMPLE would stay in one column of a matrix of SAMPLE rows."""
    step = int(n * GOLDEN)
    while math.gcd(step, n) > 1:
        step += 1
    return torch.arange(SAMPLE).mul_(step).remainder_(n)


def places_above(values: Tensor, limit: Tensor) -> Tensor:
    """(count,) int64, rising: where a number reaches its limit and is not zero; what is not a number reaches any."""
    sizes = values.abs()  # compared in their own dtype: into bools that takes three times as long
    reaches = sizes.lt_(limit).sub_(1) if limit > 0 else sizes.ne_(0)
    marks = torch.zeros(-(-len(values) // 8) * 8, dtype=torch.int8, device=values.device)
    marks[: len(values)] = reaches
    return ones_among(marks)


def sparse_bytes(n: int, count: int, item_bytes: int) -> int:
    """Of the code of `count` numbers among n."""
    return 1 + min(_lengths(n, count, item_bytes))


def _lengths(n: int, count: int, item_bytes: int) -> tuple[int, int, int]:
    """Bytes of each form, without the one that tells it."""
    places = PAGE_BYTES * _told_pages(n) + PLACE_BYTES * count
    return places + count * item_bytes, packed_bytes(n, 1) + count * item_bytes, n * item_bytes


def _told_pages(n: int) -> int:
    """Pages that say how many places they have: the last has the others."""
    return max(0, -(-n // PAGE) - 1)


def most_bytes(n: int, item_bytes: int) -> int:
    """Of any code of n numbers."""
    return sparse_bytes(n, n, item_bytes)


def sparse(values: Tensor, places: Tensor) -> Tensor:
    """The code of the values at these places: a byte that says the form, places, numbers."""
    n = len(values)
    lengths = _lengths(n, len(places), values.itemsize)
    form = lengths.index(min(lengths))
    parts = [torch.tensor([form], dtype=torch.uint8, device=values.device)]
    kept = values.index_select(0, places)
    if form == PLACES:
        ends = torch.searchsorted(places, torch.arange(1, 1 + _told_pages(n), device=values.device) * PAGE)
        parts.append(as_bytes(ends.diff(prepend=ends.new_zeros(1)).to(torch.int32)))
        parts.append(as_bytes(places.to(torch.int16)))  # its two lowest bytes
    elif form == BITMAP:
        bits = torch.ones((), dtype=torch.uint8, device=values.device) << (places & 7).to(torch.uint8)
        parts.append(bits.new_zeros(packed_bytes(n, 1)).index_add_(0, places >> 3, bits))
    else:
        kept = torch.zeros_like(values).index_put_((places,), kept)
    return torch.cat([*parts, as_bytes(kept)])


def add_sparse(total: Tensor, code: Tensor) -> bool:
    """Adds what a code means, in place; False, and nothing is added, if its length cannot be that of a code of so many
    numbers. Only what it names is touched: of a hundredth of the numbers that saves nearly all of the work, and zeros
    would change none of the others."""
    n, item_bytes = len(total), total.itemsize
    form, rest = (int(code[0]), code[1:]) if len(code) else (-1, code)
    if form == ALL and len(rest) == n * item_bytes:
        total += from_bytes(rest, total.dtype)
        return True
    if form == PLACES and (told := _told_places(rest, n, item_bytes)) is not None:
        places = told
    elif form == BITMAP and len(rest) >= (at := packed_bytes(n, 1)):
        places = ones_among(unpacked(rest[:at], 8 * at, 1))
        if len(rest) != at + item_bytes * len(places):
            return False
    else:
        return False
    total.index_add_(0, places, from_bytes(rest[len(rest) - item_bytes * len(places) :], total.dtype))
    return True


def _told_places(rest: Tensor, n: int, item_bytes: int) -> Tensor | None:
    """(count,) int64, rising, of a code in that form; None if there is no such code among n numbers."""
    at = PAGE_BYTES * _told_pages(n)
    count, left = divmod(len(rest) - at, PLACE_BYTES + item_bytes)
    if count < 0 or left:
        return None
    told = from_bytes(rest[:at], torch.int32).long()
    counts = torch.cat([told, (count - told.sum()).view(1)])
    if int(counts.min()) < 0:
        return None
    pages = torch.arange(len(counts), device=rest.device).mul_(PAGE).repeat_interleave(counts, output_size=count)
    return pages.add_(from_bytes(rest[at : at + PLACE_BYTES * count], torch.int16).long().bitwise_and_(PAGE - 1))


def from_sparse(code: Tensor, n: int, like: Tensor) -> Tensor:
    """Undoes it: (n,), zeros elsewhere.

    Raises:
        ValueError: it is no code of n numbers.
    """
    full = torch.zeros(n, dtype=like.dtype, device=like.device)
    if not add_sparse(full, code):
        raise ValueError(f"threshold: {len(code)} bytes are no code of {n} numbers; start all ranks with one plan")
    return full


@codec({"sparsity": 0.99}, {"sparsity": 0.9}, {"sparsity": 0.5}, carries=False)
def threshold(sparsity: float = 0.99) -> Codec:
    """
    Args:
        sparsity: the share of numbers that stay below, in [0, 1).

    Raises:
        ValueError: another share.
    """
    refuse_other_shares(sparsity)

    def encode(values: Tensor, draw: Draw) -> Tensor:
        return sparse(values, places_above(values, quantile(values, sparsity)))

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        return from_sparse(code, n, like)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        limit = quantile(values, sparsity)
        return torch.where(values.abs() < limit, torch.zeros_like(values), values)

    def bound(values: Tensor) -> Tensor:
        return torch.minimum(values.double().abs(), quantile(values, sparsity).double())

    def places(n: int) -> int:
        return max(1, round((1 - sparsity) * n))

    def likely_bytes(n: int, item_bytes: int) -> int:
        return sparse_bytes(n, places(n), item_bytes)

    return Codec(
        encode, decode, meaning, most_bytes, bound,
        is_fixed=False, is_biased=True, align=0, work=6.0, adds_up=False, places=places, likely_bytes=likely_bytes,
    )  # fmt: skip


def refuse_other_shares(sparsity: float) -> None:
    """
    Raises:
        ValueError: it is not in [0, 1).
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        raise ValueError(f"threshold: want a sparsity of 0 or more and below 1, got {sparsity!r}")
