"""What a codec is: numbers to bytes and back, and the registry of those there are.

A codec has no memory and asks nothing of anyone. What it leaves out is remembered, if at all, by the exchange that uses
it; so the same codec serves gradients, weights, rows and activations. Everything travels as bytes of one dtype, so the
bytes of a code are its length.

Two ways round a codec serve edges between stages. `guarded` adds one byte to a code: whether a value was not finite.
Then all values arrive as not a number, whichever of them the codec would have left out. `at_places` writes the values
where a mask says so, which both ends know: the gradient of numbers that were kept, as they are.

Source: dynamic communication thresholding for model parallelism (Gupta et al., KDD 2021) sends a gradient where its
activation was sent.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from armillary.codecs.packing import all_finite, as_bytes, from_bytes
from armillary.plans.registry import (
    NO_ALIASES,
    Aliases,
    Choice,
    Raised,
    Registry,
    examples_of,
    is_theirs,
    told,
    why_not_given,
)

__all__ = [
    "CODECS",
    "GUARD_BYTES",
    "Codec",
    "CodecEntry",
    "Draw",
    "Options",
    "at_places",
    "build_codec",
    "codec",
    "codec_of",
    "guarded",
]

Draw = torch.Generator | None  # where random numbers come from


class Codec(NamedTuple):
    """
    draw, below: a generator on the CPU, or None where the codec does not draw; encode and meaning get generators in the
        same state, so they draw the same numbers in the same order.
    encode(values, draw): (n,) floating -> (bytes,) uint8. A tile of zeros stays zeros; what is finite gives nothing
        that is not. What is not finite is coded without an error, and spoils no tile but its own.
    decode(code, n, like): -> (n,) in the dtype and on the device of `like`.
    meaning(values, draw): what decoding the code of these values gives, written without bytes: oracles use only this.
    coded_bytes(n, item_bytes): of the code of n values of so many bytes each; the most, where the data decide.
    bound(values): (n,), what |values - meaning| never exceeds. Both are compared in float64, so it covers how the
        values' dtype rounds.
    is_fixed: whether the length of a code is always `coded_bytes`.
    is_biased: False is a claim: the mean of what many draws give is the values. So it is for codecs that draw, and for
        those that leave nothing out. True, if nothing is said: an exchange should send later what was left out.
    align: values are coded in tiles of so many; cut at their borders, pieces are coded as the whole is. 0: a code hangs
        on all values together, so they cannot be cut.
    work: numbers read and written per value, by encoding and decoding together.
    draws: whether it asks `draw`. What a code needs of it stands in the code, so that whoever decodes needs none.
    adds_up: whether a sum of what codes mean is coded in as few bytes as each of them.
    keeps: the share of the values that stand in a code.
    places(n): of n values, how many arrive as they are, the others being zeros; None: it keeps none as they are.
    likely_bytes(n, item_bytes): of a code as its options would have it, where the data decide.
    says: what its options come to, in words, where they do not say it themselves.
    """

    encode: Callable[[Tensor, Draw], Tensor]
    decode: Callable[[Tensor, int, Tensor], Tensor]
    meaning: Callable[[Tensor, Draw], Tensor]
    coded_bytes: Callable[[int, int], int]
    bound: Callable[[Tensor], Tensor]
    is_fixed: bool = True
    is_biased: bool = True
    align: int = 1
    work: float = 4.0
    draws: bool = False
    adds_up: bool = True
    keeps: float = 1.0
    places: Callable[[int], int] | None = None
    likely_bytes: Callable[[int, int], int] | None = None
    says: str = ""

    def expected_bytes(self, n: int, item_bytes: int) -> int:
        """Of the code of n values of so many bytes each; where the data decide, as far as the options say."""
        return (self.likely_bytes or self.coded_bytes)(n, item_bytes)


WANTED = [field for field in Codec._fields if field not in Codec._field_defaults]
Options = Mapping[str, Any]
Factory = TypeVar("Factory", bound=Callable[..., Codec])


class CodecEntry(NamedTuple):
    """A registered factory.

    examples: sets of options that contract tests use.
    offers: sets of options worth pricing for gradients, the mildest first.
    mildness: how much of the values one code leaves out, beside other methods: the least is the mildest.
    costs: one sentence on what that does to gradients.
    carries: whether the coded exchange carries gradients by it; False where an exchange of its name has its own file.
    """

    make: Callable[..., Codec]
    examples: tuple[Options, ...]
    offers: tuple[Options, ...] = ()
    mildness: int = 0
    costs: str = ""
    carries: bool = True


CODECS: Registry[CodecEntry] = Registry("codec", "armillary.codecs")


def codec(
    *examples: Options,
    offers: tuple[Options, ...] = (),
    mildness: int = 0,
    costs: str = "",
    carries: bool = True,
    aliases: Aliases = NO_ALIASES,
) -> Callable[[Factory], Factory]:
    """Registers a factory of codecs under its own name, and aliases of it; other arguments as in `CodecEntry`."""

    tried = examples_of("codec", examples)

    def registered(make: Factory) -> Factory:
        CODECS.register(make.__name__, CodecEntry(make, tried, offers, mildness, costs, carries), aliases)
        return make

    return registered


def build_codec(name: str, **options: Any) -> Codec:
    """
    Raises:
        ValueError: no such codec, or one that knows no such option; the message lists those that exist. Or somebody's
            own factory raises, or makes no codec; the message says in which line. So say the functions that it makes.
    """
    make, what = CODECS[name].make, f"codec {Choice(name, options)}"
    if why := why_not_given(make, options):
        raise ValueError(f"codec: {name} refuses options {dict(options)}: {why}")
    try:
        if not is_theirs(make):
            return make(**options)
        made: Any = told(f"{what} cannot be made", make)(**options)
    except TypeError as error:
        raise ValueError(f"codec: {name} refuses options {dict(options)}: {error}") from error
    except Raised as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        fields = f"{', '.join(WANTED)}, and may have {', '.join(Codec._field_defaults)}"
        raise ValueError(f"{error}; a Codec wants {fields}") from error
    if not isinstance(made, Codec):
        raise ValueError(f"{what} cannot be made: {name} gives {type(made).__name__}; want a Codec")
    heard: Mapping[str, Any] = {field: told(what, one) for field, one in made._asdict().items() if callable(one)}
    return made._replace(**heard)


def codec_of(choice: Choice | str) -> Codec:
    """
    Raises:
        ValueError: as `build_codec`.
    """
    named = CODECS.named(choice)
    return build_codec(named.name, **named.options)


GUARD_BYTES = 1


def guarded(codec: Codec) -> Codec:
    """The same codec; values that are not all finite arrive as not a number, all of them."""

    def encode(values: Tensor, draw: Draw) -> Tensor:
        is_sick = ~all_finite(values)
        code = codec.encode(values.nan_to_num(0.0, 0.0, 0.0) if is_sick else values, draw)
        return torch.cat([is_sick.view(1).to(torch.uint8), code])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        values = codec.decode(code[GUARD_BYTES:], n, like)
        return torch.full_like(values, torch.nan) if code[0] else values

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        if not torch.isfinite(values).all():
            return torch.full_like(values, torch.nan)
        return codec.meaning(values, draw)

    def coded_bytes(n: int, item_bytes: int) -> int:
        return GUARD_BYTES + codec.coded_bytes(n, item_bytes)

    def likely_bytes(n: int, item_bytes: int) -> int:
        return GUARD_BYTES + codec.expected_bytes(n, item_bytes)

    return codec._replace(
        encode=encode, decode=decode, meaning=meaning, coded_bytes=coded_bytes, likely_bytes=likely_bytes
    )


def at_places(is_kept: Tensor) -> Codec:
    """
    Args:
        is_kept: (n,) bool; the others are zeros.
    """

    def encode(values: Tensor, draw: Draw) -> Tensor:
        return as_bytes(values[is_kept])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        full = torch.zeros(n, dtype=like.dtype, device=like.device)
        full[is_kept] = from_bytes(code, like.dtype)
        return full

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        return torch.where(is_kept, values, torch.zeros_like(values))

    def coded_bytes(n: int, item_bytes: int) -> int:
        return n * item_bytes

    def bound(values: Tensor) -> Tensor:
        return values.double().abs()

    return Codec(encode, decode, meaning, coded_bytes, bound, is_fixed=False, is_biased=True, align=0, work=3.0)
