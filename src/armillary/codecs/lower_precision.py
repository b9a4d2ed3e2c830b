"""Numbers in fewer bits of the same kind: float16 keeps more digits, bfloat16 the range of float32.

Source: the fp16 and bf16 compression hooks of DDP. Departure: a number beyond the largest that there is becomes that
one, with its sign; the hooks make it infinite, which no residual could mend.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import as_bytes, from_bytes, within
from armillary.codecs.registry import Codec, Draw, codec

__all__ = ["lower_precision"]

DTYPES = ("bfloat16", "float16")


@codec(
    {"dtype": "bfloat16"}, {"dtype": "float16"},
    offers=({"dtype": "bfloat16"},), mildness=1,
    costs="gradients are rounded to 16 bits; what is left out is sent later",
    aliases={"bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}},
)  # fmt: skip
def lower_precision(dtype: str = "bfloat16") -> Codec:
    """
    Args:
        dtype: "bfloat16" or "float16".

    Raises:
        ValueError: another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"codec: lower_precision knows {' and '.join(DTYPES)}, got {dtype!r}")
    to: torch.dtype = getattr(torch, dtype)
    limits = torch.finfo(to)

    def encode(values: Tensor, draw: Draw) -> Tensor:
        return as_bytes(within(values, to))

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        return within(from_bytes(code, to), like.dtype)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        return within(within(values, to), values.dtype)

    def coded_bytes(n: int, item_bytes: int) -> int:
        return n * to.itemsize

    def bound(values: Tensor) -> Tensor:
        size = values.double().abs()
        rounding = size.clamp(min=limits.smallest_normal) * (limits.eps / 2)
        return rounding + (size - limits.max).clamp(min=0)

    return Codec(encode, decode, meaning, coded_bytes, bound, work=3.0)
