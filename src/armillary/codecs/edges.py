"""What edges between stages ask of codecs beside the code: nothing that is not finite is hidden, places may be known.

`guarded` adds one byte to a code: whether a value was not finite. Then all values arrive as not a number, whichever of
them the codec would have left out. `at_places` writes the values where a mask says so, which both ends know: the
gradient of numbers that were kept, as they are.

Source: dynamic communication thresholding for model parallelism (Gupta et al., KDD 2021) sends a gradient where its
activation was sent.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import all_finite, as_bytes, from_bytes
from armillary.codecs.registry import Codec, Draw

__all__ = ["GUARD_BYTES", "at_places", "guarded"]

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
