"""Numbers in fewer bits of the same kind: float16 keeps more digits, bfloat16 the range of float32.

Source: the fp16 and bf16 compression hooks of DDP. Departure: a number beyond the largest that there is becomes that
one, with its sign; the hooks make it infinite, which no residual could mend.
"""

import torch
from torch import Tensor

from armillary.codecs.codec import Codec, Draw, codec

__all__ = ["lower_precision"]

DTYPES = ("bfloat16", "float16")


@codec({"dtype": "bfloat16"}, {"dtype": "float16"})
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

    def lowered(values: Tensor) -> Tensor:
        low = values.to(to)
        return torch.where(values.isfinite(), low.clamp(limits.min, limits.max), low)

    def encode(values: Tensor, draw: Draw) -> Tensor:
        return lowered(values).view(torch.uint8)

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        return code.clone().view(to).to(like)  # a copy, for views of a dtype want aligned bytes

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        return lowered(values).to(values.dtype)

    def coded_bytes(n: int, item_bytes: int) -> int:
        return n * to.itemsize

    def bound(values: Tensor) -> Tensor:
        size = values.double().abs()
        rounding = size.clamp(min=limits.smallest_normal) * (limits.eps / 2)
        return rounding + (size - limits.max).clamp(min=0)

    return Codec(encode, decode, meaning, coded_bytes, bound)
