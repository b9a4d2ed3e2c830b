"""The contract of a codec, held against numbers of every kind and dtype: which of its rules are broken, in words.

Tests hold every codec of the package to it, and `check` one of the user's own. A rule says where it was broken first.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from armillary.codecs.codec import Codec

__all__ = ["CODEC_RULES", "drawn", "is_read_back", "is_within_its_bound", "normal"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MANY = 1537
ROUNDED = (
    "; that is a rounding: the bound is compared in float64, so it must cover how the values' dtype rounds (take "
    "values.double() in it, and add finfo(values.dtype).eps of what is rounded)"
)
ALIKE = "; both are given generators in the same state, so they must draw the same numbers, in the same order"


def drawn(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=drawn(n), dtype=torch.float64).to(dtype)


def wide(n: int, dtype: torch.dtype) -> Tensor:
    """From what vanishes to what is large, in any dtype."""
    limits = torch.finfo(dtype)
    lowest, highest = math.log10(limits.tiny), math.log10(limits.max / 2)
    powers = torch.rand(n, generator=drawn(n), dtype=torch.float64) * (highest - lowest) + lowest
    return (torch.pow(10.0, powers) * torch.randn(n, generator=drawn(n), dtype=torch.float64).sign()).to(dtype)


def constant(n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n,), -0.3, dtype=dtype)


def subnormal(n: int, dtype: torch.dtype) -> Tensor:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (torch.randint(-3, 4, (n,), generator=drawn(n)).double() * smallest).to(dtype)


def near_the_largest(n: int, dtype: torch.dtype) -> Tensor:
    values = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    return torch.where(torch.rand(n, generator=drawn(n)) < 0.5, -values, values)


def mostly_zero(n: int, dtype: torch.dtype) -> Tensor:
    return torch.where(torch.rand(n, generator=drawn(n)) < 0.9, torch.zeros(n, dtype=dtype), normal(n, dtype))


KINDS = (normal, wide, constant, subnormal, near_the_largest, mostly_zero)


def where(broken: Callable[[Codec, Tensor], str], codec: Codec, sizes: tuple[int, ...]) -> Iterator[str]:
    """Numbers with which a rule is broken, and how."""
    for kind, dtype, n in product(KINDS, DTYPES, sizes):
        if how := broken(codec, kind(n, dtype)):
            yield f"{n} numbers, {kind.__name__.replace('_', ' ')}, {dtype}: {how}"


def misread(codec: Codec, values: Tensor) -> str:
    n, before = len(values), values.clone()
    code = codec.encode(values, drawn())
    if code.dtype != torch.uint8 or code.dim() != 1:
        return f"the code is {code.dtype} of {code.dim()} dimensions; want torch.uint8 of one"
    if not torch.equal(values, before):
        return "encode changes the values it is given; want them as they were"
    said = codec.coded_bytes(n, values.itemsize)
    if len(code) != said if codec.is_fixed else len(code) > said:
        return f"the code has {len(code)} bytes, coded_bytes says {said}"
    back, meant = codec.decode(code, n, values[:0]), codec.meaning(values, drawn())
    if back.dtype != values.dtype or meant.dtype != values.dtype:
        return f"decode gives {back.dtype} and meaning {meant.dtype}; want the dtype of the values"
    if not torch.equal(back, meant):
        return f"decode gives other numbers than meaning{ALIKE if codec.draws else ''}"
    return ""


def beyond(codec: Codec, values: Tensor) -> str:
    meaning, bound = codec.meaning(values, drawn()), codec.bound(values)
    error = (values.double() - meaning.double()).abs()
    if odd := int((~meaning.isfinite()).sum()):
        return f"{odd} are no finite numbers any more"
    is_far = error > bound * (1 + 1e-12)
    if not is_far.any():
        return ""
    over = (error - bound.double())[is_far]
    is_rounding = bool((over <= 2 * torch.finfo(values.dtype).eps * error[is_far]).all())
    hint = ROUNDED if is_rounding else ""
    return f"{len(over)} are further off than the bound says, by up to {float(over.max()):.2g}{hint}"


def is_read_back(codec: Codec) -> str:
    sizes = {0, 1, max(0, codec.align - 1), codec.align, codec.align + 1, 1000, MANY}
    return next(where(misread, codec, tuple(sorted(sizes))), "")


def is_within_its_bound(codec: Codec) -> str:
    return next(where(beyond, codec, (MANY,)), "")


def keeps_zeros(codec: Codec) -> str:
    zeros = torch.zeros(1000)
    back = codec.decode(codec.encode(zeros, drawn()), 1000, zeros)
    return "" if torch.equal(back, zeros) else f"{int(back.count_nonzero())} of 1000 zeros come back as something else"


def draws_as_it_says(codec: Codec) -> str:
    values = normal(1000, torch.float32)
    if not torch.equal(codec.encode(values, drawn()), codec.encode(values, drawn())):
        return "two codes from generators in the same state differ; draw from `draw` alone"
    differs = not torch.equal(codec.meaning(values, drawn(1)), codec.meaning(values, drawn(2)))
    if differs == codec.draws:
        return ""
    return f"draws is {codec.draws}, and other draws give {'other' if differs else 'the same'} numbers"


def can_be_cut(codec: Codec) -> str:
    if not codec.align or codec.draws:
        return ""
    values, cut = normal(8 * 320 + 5, torch.float32), 3 * codec.align
    pieces = torch.cat([codec.meaning(values[:cut], None), codec.meaning(values[cut:], None)])
    if torch.equal(pieces, codec.meaning(values, None)):
        return ""
    return f"cut at number {cut}, pieces mean other numbers than the whole; say in `align` what tiles are, or 0"


def stands_what_is_not_finite(codec: Codec) -> str:
    for odd in (math.inf, -math.inf, math.nan):
        values = normal(4 * max(codec.align, 64), torch.float32)
        healthy = codec.meaning(values, drawn())
        values[0] = odd
        code = codec.encode(values, drawn())
        if len(code) > codec.coded_bytes(len(values), 4):
            return f"with {odd} the code is longer than coded_bytes says"
        back = codec.decode(code, len(values), values[:0])
        if codec.align and not torch.equal(back[codec.align :], healthy[codec.align :]):
            return f"{odd} in the first tile changes others"
    return ""


def is_read_from_a_message(codec: Codec) -> str:
    values = normal(64, torch.float64)
    code = codec.encode(values, drawn())
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), code, torch.zeros(5, dtype=torch.uint8)])
    try:
        back = codec.decode(message[3:-5], 64, values)
    except RuntimeError as error:
        return f"a code from the middle of a message cannot be decoded ({error}); clone it before it is viewed"
    return (
        ""
        if torch.equal(back, codec.meaning(values, drawn()))
        else "from the middle of a message it reads other numbers"
    )


CODEC_RULES: Mapping[str, Callable[[Codec], str]] = {
    "what is decoded is what `meaning` says, bit for bit, in as many bytes as `coded_bytes` says": is_read_back,
    "no number is further off than `bound` says": is_within_its_bound,
    "zeros stay zeros": keeps_zeros,
    "what is drawn comes from `draw`, and `draws` says so": draws_as_it_says,
    "pieces cut between tiles mean what the whole means": can_be_cut,
    "what is not finite spoils no tile but its own": stands_what_is_not_finite,
    "a code is read from the middle of a message": is_read_from_a_message,
}
