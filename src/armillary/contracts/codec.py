"""The contract of a codec, held against numbers of every kind and dtype: which of its rules are broken, in words.

Tests hold every codec of the package to it, and `check` one of the user's own. A rule says where it was broken first.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from armillary.codecs.registry import Codec
from armillary.plans.registry import Raised

__all__ = ["CODEC_RULES", "drawn", "is_read_back", "is_within_its_bound", "normal"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MANY = 1537
ROUNDED = (
    "; that is a rounding: the bound is compared in float64, so it must cover how the values' dtype rounds (take "
    "values.double() in it, and add finfo(values.dtype).eps of what is rounded)"
)
OF_TILES = "say in `align` how many numbers a tile has, or 0 where a code cannot be cut"
DRAWS = 256  # whose mean is looked at
CHANCE = 20.0  # times what it is off by chance; a tenth of that is rare
NO_BIAS = 1e-5  # of values of size 1: what a dtype rounds is no bias
ALIKE = (
    "; both are given generators in the same state, and leave them in different ones: they must draw the same numbers, "
    "in the same order"
)


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
        numbers = f"{n} numbers, {kind.__name__.replace('_', ' ')}, {dtype}"
        try:
            how = broken(codec, kind(n, dtype))
        except Exception as error:
            error.add_note(numbers)
            raise
        if how:
            yield f"{numbers}: {how}"


def first_apart(who: tuple[str, str], one: Tensor, other: Tensor, begin: int = 0) -> str:
    """The first number in which they differ, in words; who: gives them. begin: where they were cut off."""
    if one.shape != other.shape:
        return f"{who[0]} {tuple(one.shape)} numbers, {who[1]} {tuple(other.shape)}"
    at = int((one != other).nonzero()[0])
    return f"number {begin + at}: {who[0]} {float(one[at]):.6g}, {who[1]} {float(other[at]):.6g}"


def draw_otherwise(codec: Codec, values: Tensor) -> bool:
    """Whether encode and meaning leave their generators in different states."""
    encoding, meaning = drawn(), drawn()
    codec.encode(values, encoding)
    codec.meaning(values, meaning)
    return not torch.equal(encoding.get_state(), meaning.get_state())


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
    if torch.equal(back, meant):
        return ""
    hint = ALIKE if draw_otherwise(codec, values) else ""
    return (
        f"decode gives other numbers than meaning; first {first_apart(('decode gives', 'meaning'), back, meant)}{hint}"
    )


def beyond(codec: Codec, values: Tensor) -> str:
    meaning, bound = codec.meaning(values, drawn()), codec.bound(values)
    if not isinstance(bound, Tensor) or bound.shape != values.shape:
        what = tuple(bound.shape) if isinstance(bound, Tensor) else type(bound).__name__
        return f"bound gives {what}; want a tensor of {tuple(values.shape)}, a number for each value"
    error = (values.double() - meaning.double()).abs()
    if len(lost := (~meaning.isfinite()).nonzero().flatten()):
        at = int(lost[0])
        first = f"{float(values[at]):.6g} comes back as {float(meaning[at]):.6g}"
        return f"{len(lost)} are no finite numbers any more; first number {at}: {first}"
    is_far = error > bound * (1 + 1e-12)
    if not is_far.any():
        return ""
    at = int((error - bound.double()).argmax())
    worst = f"{float(values[at]):.6g} comes back as {float(meaning[at]):.6g}, off by {float(error[at]):.6g}"
    worst = f"number {at}: {worst}, bound {float(bound[at]):.6g}"
    over = (error - bound.double())[is_far]
    is_rounding = bool((over <= 2 * torch.finfo(values.dtype).eps * error[is_far]).all())
    hint = ROUNDED if is_rounding else ""
    return f"{len(over)} are further off than the bound says, by up to {float(over.max()):.2g}; worst {worst}{hint}"


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
    return f"cut at number {cut}, pieces mean other numbers than the whole; {OF_TILES}"


def has_the_mean_it_says(codec: Codec) -> str:
    """Whether `is_biased=False` is so. Errors of two draws are independent, so the mean product of pairs is the square
    of what the mean is off; beside it stands what pairs differ by."""
    values = normal(1024, torch.float32)
    if codec.is_biased:
        return ""
    if not codec.draws:
        meant = codec.meaning(values, None)
        if torch.equal(meant, values):
            return ""
        first = first_apart(("the value is", "meaning gives"), values, meant)
        return f"is_biased is False, but nothing is drawn and numbers are changed; first {first}; say is_biased=True"
    draw = drawn()
    found = torch.stack([codec.meaning(values, draw).double() for _ in range(DRAWS)])
    errors = found - values.double()
    pairs = (errors @ errors.T)[tuple(torch.triu_indices(DRAWS, DRAWS, 1))]
    off = math.sqrt(max(float(pairs.mean()), 0.0) / len(values))
    if off <= NO_BIAS or float(pairs.sum()) <= CHANCE * float(pairs.norm()):
        return ""
    mean = found.mean(0)
    at = int((mean - values.double()).abs().argmax())
    worst = f"number {at}: {float(values[at]):.6g} comes back as {float(mean[at]):.6g} in the mean"
    return f"is_biased is False, but the mean of {DRAWS} draws is off by {off:.2g}; worst {worst}; say is_biased=True"


def stands_what_is_not_finite(codec: Codec) -> str:
    for odd in (math.inf, -math.inf, math.nan):
        values = normal(4 * max(codec.align, 64), torch.float32)
        healthy = codec.decode(codec.encode(values, drawn()), len(values), values[:0])
        values[0] = odd
        code = codec.encode(values, drawn())
        if len(code) > codec.coded_bytes(len(values), 4):
            return f"with {odd} the code is longer than coded_bytes says"
        back = codec.decode(code, len(values), values[:0])
        beyond_it = back[codec.align :], healthy[codec.align :]
        if codec.align and not torch.equal(*beyond_it):
            first = first_apart((f"with {odd} it is", "without"), *beyond_it, codec.align)
            return f"{odd} in the first tile of `align`={codec.align} changes others; first {first}; {OF_TILES}"
    return ""


def is_read_from_a_message(codec: Codec) -> str:
    values = normal(64, torch.float64)
    code = codec.encode(values, drawn())
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), code, torch.zeros(5, dtype=torch.uint8)])
    try:
        back = codec.decode(message[3:-5], 64, values)
    except (RuntimeError, Raised) as error:
        return f"a code from the middle of a message cannot be decoded ({error}); clone it before it is viewed"
    alone = codec.decode(code, 64, values)
    if torch.equal(back, alone):
        return ""
    first = first_apart(("there it is", "alone"), back, alone)
    return f"from the middle of a message it reads other numbers; first {first}"


CODEC_RULES: Mapping[str, Callable[[Codec], str]] = {
    "what is decoded is what `meaning` says, bit for bit, in as many bytes as `coded_bytes` says": is_read_back,
    "no number is further off than `bound` says": is_within_its_bound,
    "zeros stay zeros": keeps_zeros,
    "what is drawn comes from `draw`, and `draws` says so": draws_as_it_says,
    "the mean of what is drawn is the values, where `is_biased=False`": has_the_mean_it_says,
    "pieces cut between tiles mean what the whole means": can_be_cut,
    "what is not finite spoils no tile but its own": stands_what_is_not_finite,
    "a code is read from the middle of a message": is_read_from_a_message,
}
