"""Which snapshots a batch is drawn from: all once, the newest, or a uniform sample of all (a reservoir).

A window is a rule and holds nothing; `WindowRows` holds the snapshots, a tensor a field, into which they are read.

Source of the reservoir: algorithm R (Vitter, "Random Sampling with a Reservoir", 1985), as in Melissa (Schouler,
Meyer et al.). Departure: a snapshot that the reservoir leaves out is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from armillary.feeds.writer import Arrays, Field, Id

__all__ = ["AllOnce", "Latest", "Reservoir", "Window", "WindowRows"]


@dataclass(frozen=True)
class AllOnce:
    """Every snapshot is in one batch, in the order of its coming; the last batch may be smaller."""

    keeps: ClassVar[bool] = False  # snapshots that were in a batch

    def rows(self, batch: int) -> int:
        """How many it holds."""
        return batch

    def row(self, seen: int, held: int, rows: int, draw: Generator) -> int | None:
        """Where the snapshot goes that came after `seen` others; None: nowhere."""
        return held

    def drawn(self, held: int, batch: int, draw: Generator) -> Tensor:
        """The rows of a batch."""
        return torch.arange(held)


@dataclass(frozen=True)
class Latest:
    """Batches are drawn from the newest `n` snapshots, without repetition inside a batch."""

    n: int
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _refuse(self.n)

    def rows(self, batch: int) -> int:
        return self.n

    def row(self, seen: int, held: int, rows: int, draw: Generator) -> int | None:
        return held if held < rows else seen % rows

    def drawn(self, held: int, batch: int, draw: Generator) -> Tensor:
        return torch.randperm(held, generator=draw)[:batch]


@dataclass(frozen=True)
class Reservoir:
    """Batches are drawn from `n` snapshots that are a uniform sample of all that came (algorithm R)."""

    n: int
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _refuse(self.n)

    def rows(self, batch: int) -> int:
        return self.n

    def row(self, seen: int, held: int, rows: int, draw: Generator) -> int | None:
        if held < rows:
            return held
        at = int(torch.randint(seen + 1, (1,), generator=draw))
        return at if at < rows else None

    def drawn(self, held: int, batch: int, draw: Generator) -> Tensor:
        return torch.randperm(held, generator=draw)[:batch]


Window = AllOnce | Latest | Reservoir


def _refuse(n: int) -> None:
    if n < 1:
        raise ValueError(f"want a window of at least 1 snapshot, got {n}")


@dataclass
class WindowRows:
    """The snapshots of a window: `held` of `size` rows, each field a tensor of shape (size, *its shape)."""

    size: int
    fields: tuple[Field, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ids: list[Id] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}
        for one in self.fields:
            dtype = getattr(torch, one.dtype)
            self.tensors[one.name] = torch.empty((self.size, *one.shape), dtype=dtype)
            self._bytes[one.name] = self.tensors[one.name].view(self.size, -1).view(torch.uint8).numpy()

    def arrays(self, row: int) -> Arrays:
        """The bytes of a row, to be read into."""
        return {name: rows[row] for name, rows in self._bytes.items()}

    def place(self, row: int, id: Id) -> None:
        """Says whose bytes are there now."""
        self.ids[row : row + 1] = [id]

    def batch(self, at: Tensor) -> dict[str, Tensor]:
        return {name: rows[at] for name, rows in self.tensors.items()}

    def fill(self, ids: Sequence[Id], tensors: dict[str, Tensor]) -> None:
        """With what a state holds."""
        self.ids[:] = ids
        for name, rows in tensors.items():
            self.tensors[name][: len(rows)] = rows
