"""The largest numbers of every chunk, and where they stand in it.

Source: sparsification with memory (Stich et al., 2018); chunks as in SparseLoCo (2025). Of numbers of equal size the
first ones are taken. What is not finite is larger than anything.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import as_bytes, chunks_of, from_bytes, tiled
from armillary.codecs.registry import Codec, Draw, codec

__all__ = ["top_k"]


@codec(
    {"keep": 0.01}, {"keep": 0.25}, {"keep": 0.3}, {"keep": 0.1, "chunk": 64},
    offers=({"keep": 0.01},), mildness=7,
    costs="only the largest gradients go at once; the others wait until they have grown",
)  # fmt: skip
def top_k(keep: float = 0.01, chunk: int = 0) -> Codec:
    """
    Args:
        keep: of every chunk, the share that is sent, rounded up to whole numbers.
        chunk: so many numbers; 0: round(1 / keep).

    Raises:
        ValueError: as `chunks_of`.
    """
    chunks = chunks_of("top_k", keep, chunk)
    place_type = next(t for t in (torch.uint8, torch.int16, torch.int32) if chunks.chunk - 1 <= torch.iinfo(t).max)

    def places(values: Tensor) -> Tensor:
        size = tiled(values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf), chunks.chunk)
        if chunks.count == 1 and len(size):
            return size.argmax(1, keepdim=True)
        order = size.sort(dim=1, descending=True, stable=True).indices
        return order[:, : chunks.count].sort(1).values

    def encode(values: Tensor, draw: Draw) -> Tensor:
        found = places(values)
        return torch.cat([as_bytes(found.view(-1).to(place_type)), as_bytes(chunks.gathered(values, found))])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        at = chunks.kept(n) * place_type.itemsize
        found = from_bytes(code[:at], place_type).long().view(-1, chunks.count)
        return chunks.spread(from_bytes(code[at:], like.dtype), found, n)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        size = tiled(values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf), chunks.chunk)
        if not len(size):
            return values.clone()
        least = size.kthvalue(chunks.chunk - chunks.count + 1, dim=1, keepdim=True).values
        more, equal = size > least, size == least
        is_kept = more | (equal & (equal.cumsum(1) <= chunks.count - more.sum(1, keepdim=True)))
        return torch.where(is_kept.view(-1)[: len(values)], values, torch.zeros_like(values))

    def coded_bytes(n: int, item_bytes: int) -> int:
        return chunks.kept(n) * (place_type.itemsize + item_bytes)

    def bound(values: Tensor) -> Tensor:
        least = tiled(values.double().abs(), chunks.chunk).sort(1, descending=True).values[:, chunks.count - 1]
        limit = least.repeat_interleave(chunks.chunk)[: len(values)]
        return torch.minimum(values.double().abs(), limit)

    return Codec(
        encode, decode, meaning, coded_bytes, bound,
        is_biased=True, align=chunks.chunk, work=4.0, adds_up=False, keeps=chunks.share, places=chunks.kept,
        says=str(chunks),
    )  # fmt: skip
