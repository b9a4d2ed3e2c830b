"""How the tensors of one group lie side by side in one flat tensor: where each begins, how long the whole is.

Bucket, price and saved state read the same lengths here. Every tensor begins at a multiple of `align` numbers, so that
a tile of a codec never holds numbers of two parameters: one scale for both would move the smaller one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from armillary.plans.parameter import ParameterFact

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """Tensors of one dtype in one flat tensor, zeros between them where they are aligned.

    Args of note:
        dtype: as in "float32".
        align: every tensor begins at a multiple of so many numbers.
        is_guarded: whether the tail ends with a non-finite flag, 1 where this rank's numbers are not all finite.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    align: int = 1
    is_guarded: bool = False

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or len(set(self.names)) != len(self.names) or not self.names:
            raise ValueError(f"layout: want a shape for each of different names, got {self.names} and {self.shapes}")
        if self.align < 1:
            raise ValueError(f"layout: want tensors aligned to 1 number or more, got {self.align}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, in numbers; and the length of all of them."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + math.ceil(math.prod(shape) / self.align) * self.align)
        return tuple(ends)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last number of every tensor, the last not included; what is between two spans is zero."""
        return [(at, at + math.prod(shape)) for at, shape in zip(self.offsets, self.shapes, strict=False)]

    @property
    def numel(self) -> int:
        """Of all tensors, with the zeros between them."""
        return self.offsets[-1]

    @property
    def tail(self) -> int:
        """Numbers behind the values: a flag of use per tensor, and the non-finite flag."""
        return len(self.names) + self.is_guarded

    @property
    def item_bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.numel * self.item_bytes

    @property
    def joined_bytes(self) -> int:
        """Of the values with the tail behind them in the same dtype."""
        return (self.numel + self.tail) * self.item_bytes


def layout_of(facts: Iterable[ParameterFact], align: int = 1, is_guarded: bool = False) -> Layout:
    """That of parameters of one dtype, in this order."""
    members = tuple(facts)
    shapes = tuple(fact.shape for fact in members)
    return Layout(tuple(fact.name for fact in members), shapes, members[0].dtype, align, is_guarded)
