"""What this rank expects to look up a few batches from now, worked out beforehand and told to the others.

It is worked out while rows of the batch at hand are on their way and nothing else is to be done; at the turn of the
next batch, when every rank waits for every other, it lies ready.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.exchanges.look_up import FIRST_COUNT, foreseen_of_each, outlook_columns
from armillary.runtime.hybrid.habits import Habits
from armillary.runtime.hybrid.table import RowTable

__all__ = ["Outlook"]


class Outlook:
    """Of one rank. tables: those that look ahead, in the order in which a forward reads them.

    wanted: sorted distinct keys of the look-ups it expects, by bit (see `exchanges/look_up.py`).
    said: (ranks, columns) float64, what each rank is told of them in the rounds to come; None with no table.
    """

    def __init__(self, tables: Sequence[RowTable], workers: int):
        self.tables = list(tables)
        self.each = foreseen_of_each(len(self.tables))
        self.shape = (workers, outlook_columns(len(self.tables)))
        self.clear()

    def clear(self) -> None:
        """Nothing is expected."""
        self.leaves: Sequence[Tensor] = ()
        self.wanted: dict[int, Tensor] = {}
        self.said = torch.zeros(self.shape, dtype=torch.float64) if self.tables else None

    def expect(self, habits: Habits, leaves: Sequence[Tensor]) -> None:
        """A batch with these tensors is expected to be looked up as those before it were; no tensors: nothing is."""
        self.clear()
        self.leaves = leaves
        ranks, columns = self.shape
        nothing, nbytes = [0] * ranks, 0
        counts = [nothing] * (columns - FIRST_COUNT)
        for index, table in enumerate(self.tables):
            for bit, keys in enumerate(habits.expect(table, leaves, self.each), index * self.each):
                self.wanted[bit], counts[bit] = keys, table.ownership.counts(keys)
                nbytes += keys.numel() * table.row_bytes
        bits = sum(1 << bit for bit in self.wanted)
        told = zip([bits] * ranks, [nbytes] * ranks, *counts, strict=True)
        self.said = torch.tensor(list(told), dtype=torch.float64)

    def deal_anew(self, habits: Habits) -> None:
        """The same rows are expected, of other owners."""
        if self.tables:
            self.expect(habits, self.leaves)
