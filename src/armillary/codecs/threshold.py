"""The numbers that reach a threshold, and where they stand; the threshold is a quantile of the sizes.

Source: dynamic communication thresholding (Gupta et al., KDD 2021). Places travel as the shortest of three forms at
their count: one bit a number, four bytes a place, or all numbers without places. Zeros are never sent.
"""

import torch
from torch import Tensor

from armillary.codecs.codec import Codec, Draw, codec
from armillary.codecs.tiles import as_bytes, from_bytes, packed, packed_bytes, unpacked

__all__ = ["from_sparse", "is_sparse", "kept_above", "most_bytes", "quantile", "sparse", "sparse_bytes", "threshold"]

PLACES, BITMAP, ALL = range(3)
EXACT = 1 << 16  # numbers up to which the quantile is exact
SAMPLE = 20_000


def quantile(values: Tensor, sparsity: float) -> Tensor:
    """(): the size that a share 1 - sparsity of the values reaches; of more than 65,536, of every so manieth."""
    if not len(values):
        return values.new_zeros(())
    size = values.abs()
    if len(size) > EXACT:
        size = size[:: len(size) // SAMPLE]
    count = max(1, round((1 - sparsity) * len(size)))
    return size.kthvalue(len(size) - count + 1).values


def kept_above(values: Tensor, limit: Tensor) -> Tensor:
    """(n,) bool: what reaches its limit and is not zero; what is not a number reaches any."""
    return ~(values.abs() < limit) & (values != 0)


def sparse_bytes(n: int, count: int, item_bytes: int) -> int:
    """Of the code of `count` numbers among n."""
    return 1 + min(count * (4 + item_bytes), packed_bytes(n, 1) + count * item_bytes, n * item_bytes)


def most_bytes(n: int, item_bytes: int) -> int:
    """Of any code of n numbers."""
    return sparse_bytes(n, n, item_bytes)


def sparse(values: Tensor, is_kept: Tensor) -> Tensor:
    """The code of the values where the mask says so: a byte that says the form, places, numbers."""
    n, count, item = len(values), int(is_kept.sum()), values.itemsize
    lengths = [count * (4 + item), packed_bytes(n, 1) + count * item, n * item]
    form = lengths.index(min(lengths))
    parts = [torch.tensor([form], dtype=torch.uint8, device=values.device)]
    if form == PLACES:
        parts.append(as_bytes(is_kept.nonzero().view(-1).to(torch.int32)))
    elif form == BITMAP:
        parts.append(packed(is_kept.to(torch.uint8), 1))
    kept = values[is_kept] if form != ALL else torch.where(is_kept, values, torch.zeros_like(values))
    return torch.cat([*parts, as_bytes(kept)])


def is_sparse(code: Tensor, n: int, item_bytes: int) -> bool:
    """Whether it can be the code of n numbers of so many bytes, as its length says."""
    form, rest = (int(code[0]), code[1:]) if len(code) else (-1, code)
    if form == BITMAP:
        at = packed_bytes(n, 1)
        return len(rest) >= at and len(rest) == at + item_bytes * int(unpacked(rest[:at], n, 1).sum())
    return len(rest) % (4 + item_bytes) == 0 if form == PLACES else form == ALL and len(rest) == n * item_bytes


def from_sparse(code: Tensor, n: int, like: Tensor) -> Tensor:
    """Undoes it: (n,), zeros elsewhere."""
    form, rest = int(code[0]), code[1:]
    if form == ALL:
        return from_bytes(rest, like.dtype)
    full = torch.zeros(n, dtype=like.dtype, device=like.device)
    if form == PLACES:
        count = len(rest) // (4 + like.itemsize)
        full[from_bytes(rest[: 4 * count], torch.int32).long()] = from_bytes(rest[4 * count :], like.dtype)
        return full
    at = packed_bytes(n, 1)
    full[unpacked(rest[:at], n, 1).bool()] = from_bytes(rest[at:], like.dtype)
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
        return sparse(values, kept_above(values, quantile(values, sparsity)))

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
