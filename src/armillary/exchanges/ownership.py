"""Which worker owns which row of a table.

Rows are dealt out by a bijection id -> key, where key = owner * capacity + local row: sorting keys groups ids by owner
and, within an owner, by place in its shard. `modulo` deals neighbouring ids to different owners, so a vocabulary sorted
by frequency is balanced (contiguous blocks give the first owner nearly all traffic). `hashed` scatters ids first, by
the golden section (Knuth, The Art of Computer Programming 3, section 6.4), and cuts blocks: for ids whose stride
divides the number of owners.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from armillary.plans.profile import RowFacts

__all__ = ["Order", "Ownership", "orders", "owners_among"]

_GOLDEN = (5**0.5 - 1) / 2
Order = Literal["modulo", "hashed"]


def orders(rows: RowFacts) -> list[Order]:
    """Those worth pricing for a table: modulo, and hashed where it would spread the load better."""
    return ["modulo", "hashed"] if rows.imbalance_hashed < rows.imbalance_modulo else ["modulo"]


def owners_among(owners: int, workers: int, workers_per_node: int) -> tuple[int, ...]:
    """`owners` of the `workers` ranks, spread over nodes before filling any: node 0, node 1, ..., then second ranks.

    Raises:
        ValueError: more owners than workers, or none.
    """
    if not 1 <= owners <= workers:
        raise ValueError(f"ownership: {owners} owners among {workers} workers; want 1 to {workers}")
    by_place = [rank for place in range(workers_per_node) for rank in range(place, workers, workers_per_node)]
    return tuple(sorted(by_place[:owners]))


@dataclass(frozen=True)
class Ownership:
    """`rows` rows dealt to `owners` (ranks, ascending), one of them possibly the only one."""

    rows: int
    owners: tuple[int, ...]
    workers: int
    order: Order = "modulo"

    def __post_init__(self) -> None:
        if self.rows < 1 or not self.owners or len(set(self.owners)) != len(self.owners):
            raise ValueError(f"ownership: want rows and distinct owners, got {self.rows} rows, owners {self.owners}")
        if self.order not in ("modulo", "hashed"):
            raise ValueError(f"ownership: order {self.order!r} is none of modulo, hashed")

    @property
    def capacity(self) -> int:
        """Rows of the fullest shard."""
        return -(-self.rows // len(self.owners))

    @property
    def multiplier(self) -> int:
        """The number next to rows * golden section that has no factor in common with rows."""
        multiplier = max(1, round(self.rows * _GOLDEN))
        while math.gcd(multiplier, self.rows) != 1:
            multiplier += 1
        return multiplier

    def shard_rows(self, rank: int) -> int:
        """How many rows `rank` owns."""
        if rank not in self.owners:
            return 0
        place = self.owners.index(rank)
        if self.order == "hashed":
            return max(0, min(self.capacity, self.rows - place * self.capacity))
        return (self.rows - place + len(self.owners) - 1) // len(self.owners)

    def keys(self, ids: Tensor) -> Tensor:
        """ids int64 -> keys int64, the same shape. Ids must lie in [0, rows)."""
        if len(self.owners) == 1:
            return ids
        if self.order == "hashed":
            return ids * self.multiplier % self.rows
        return ids % len(self.owners) * self.capacity + torch.div(ids, len(self.owners), rounding_mode="floor")

    def ids(self, rank: int, local_rows: Tensor | None = None) -> Tensor:
        """The ids `rank` owns, in shard order: (shard_rows,); or those of the given local rows."""
        if local_rows is None:
            local_rows = torch.arange(self.shard_rows(rank))
        if len(self.owners) == 1 or rank not in self.owners:
            return local_rows
        return self.ids_of(local_rows + self.owners.index(rank) * self.capacity)

    def ids_of(self, keys: Tensor) -> Tensor:
        """keys int64 -> ids int64, the same shape: undoes `keys`."""
        if len(self.owners) == 1:
            return keys
        if self.order == "hashed":
            return keys * pow(self.multiplier, -1, self.rows) % self.rows
        return keys % self.capacity * len(self.owners) + torch.div(keys, self.capacity, rounding_mode="floor")

    def counts(self, keys: Tensor) -> list[int]:
        """How many of the sorted distinct `keys` each of the workers owns, one number per rank."""
        edges = torch.arange(len(self.owners) + 1, dtype=keys.dtype, device=keys.device) * self.capacity
        cuts = torch.searchsorted(keys, edges).tolist()
        counts = [0] * self.workers
        for place, rank in enumerate(self.owners):
            counts[rank] = cuts[place + 1] - cuts[place]
        return counts
