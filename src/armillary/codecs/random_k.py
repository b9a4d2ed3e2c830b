"""Some numbers of every chunk, drawn by lot. The code holds the seed, so both ends know which without places.

Source: sparsification with memory (Stich et al., 2018). Departure: numbers are sent as they are, not divided by their
share, since what is left out is sent later. Where all ranks draw alike, sums have the same places as summands.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import as_bytes, chunks_of, from_bytes
from armillary.codecs.registry import Codec, Draw, codec

__all__ = ["random_k"]

SEED_BYTES = 8


@codec(
    {"keep": 0.1}, {"keep": 0.25}, {"keep": 0.3, "chunk": 64},
    mildness=8, costs="gradients drawn by lot go at once; the others wait for their lot",
)  # fmt: skip
def random_k(keep: float = 0.01, chunk: int = 0) -> Codec:
    """
    Args:
        keep: of every chunk, the share that is sent, rounded up to whole numbers.
        chunk: so many numbers; 0: round(1 / keep).

    Raises:
        ValueError: as `chunks_of`.
    """
    chunks = chunks_of("random_k", keep, chunk)

    def seed_of(draw: Draw) -> int:
        return 0 if draw is None else int(torch.randint(1 << 62, (1,), generator=draw))

    def places(seed: int, n: int) -> Tensor:
        lots = torch.rand(chunks.number(n), chunks.chunk, generator=torch.Generator().manual_seed(seed))
        return lots.argsort(1)[:, : chunks.count]

    def encode(values: Tensor, draw: Draw) -> Tensor:
        seed = seed_of(draw)
        kept = chunks.gathered(values, places(seed, len(values)).to(values.device))
        return torch.cat([as_bytes(torch.tensor([seed], device=values.device)), as_bytes(kept)])

    def decode(code: Tensor, n: int, like: Tensor) -> Tensor:
        seed = int(from_bytes(code[:SEED_BYTES], torch.int64))
        kept = from_bytes(code[SEED_BYTES:], like.dtype)
        return chunks.spread(kept, places(seed, n).to(like.device), n)

    def meaning(values: Tensor, draw: Draw) -> Tensor:
        drawn = places(seed_of(draw), len(values))
        at = (drawn + torch.arange(len(drawn)).unsqueeze(1) * chunks.chunk).view(-1)
        mask = torch.zeros(chunks.number(len(values)) * chunks.chunk, dtype=torch.bool)
        mask[at] = True
        return torch.where(mask[: len(values)], values, torch.zeros_like(values))

    def coded_bytes(n: int, item_bytes: int) -> int:
        return SEED_BYTES + chunks.kept(n) * item_bytes

    def bound(values: Tensor) -> Tensor:
        return values.double().abs()

    return Codec(
        encode, decode, meaning, coded_bytes, bound,
        is_biased=True, align=chunks.chunk, work=50.0, draws=True, keeps=chunks.share, places=chunks.kept,
        says=str(chunks),
    )  # fmt: skip
