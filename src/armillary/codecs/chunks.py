"""So many numbers of every chunk: where they stand, and how long their code is. Codecs that keep a share stand on it.

Chunks instead of one choice over all numbers: the size is fixed, pieces are coded as the whole is, and finding a few
among a hundred takes a fifth of the time.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.codecs.tiles import tiled

__all__ = ["Chunks", "chunks_of"]


@dataclass(frozen=True)
class Chunks:
    """`count` numbers of every `chunk`."""

    chunk: int
    count: int

    @property
    def share(self) -> float:
        return self.count / self.chunk

    def number(self, n: int) -> int:
        """How many chunks n numbers fill; the last may be short."""
        return -(-n // self.chunk)

    def kept(self, n: int) -> int:
        """Of n numbers, how many stand in the code; zeros behind a short chunk may be among them."""
        return self.number(n) * self.count

    def gathered(self, values: Tensor, places: Tensor) -> Tensor:
        """places (chunks, count) within their chunks -> the numbers there, (chunks * count,)."""
        return tiled(values, self.chunk).gather(1, places).view(-1)

    def spread(self, kept: Tensor, places: Tensor, n: int) -> Tensor:
        """Undoes it: (n,), zeros elsewhere."""
        full = torch.zeros(len(places), self.chunk, dtype=kept.dtype, device=kept.device)
        return full.scatter(1, places, kept.view_as(places)).view(-1)[:n]

    def __str__(self) -> str:
        return f"{self.count} of every {self.chunk} numbers at once, {self.share:.3g} of all"


def chunks_of(who: str, keep: float, chunk: int) -> Chunks:
    """ceil(keep * chunk) of every chunk; 0: of round(1 / keep) numbers.

    Raises:
        ValueError: a share outside (0, 1], or a negative chunk.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"codec: {who} keeps a share above 0 and at most 1, got {keep!r}")
    if not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"codec: {who} wants chunks of 1 number or more, or 0 for round(1 / keep), got {chunk!r}")
    length = chunk or round(1 / keep)
    return Chunks(length, max(1, math.ceil(keep * length - 1e-9)))
