"""What this rank predicts to look up a few batches from now, worked out beforehand and announced to the others.

It is worked out while rows of the batch at hand are on their way and nothing else is to be done. When the next batch
begins, and every rank waits for every other, it lies ready.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.exchanges.announcement import FIRST_COUNT, announcement_columns, most_of_each
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.prefetch.predictor import LookupPredictor

__all__ = ["Announcement"]


class Announcement:
    """Of one rank. tables: those that prefetch, in the order in which a forward reads them.

    wanted: sorted distinct keys of the look-ups it predicts, by bit (see `exchanges/announcement.py`).
    columns: (ranks, n) float64, what rides on the headers to each rank in the rounds to come.
    """

    def __init__(self, tables: Sequence[RowTable], workers: int):
        self.tables = list(tables)
        self.each = most_of_each(len(self.tables))
        self.shape = (workers, announcement_columns(len(self.tables)))
        self.clear()

    def clear(self) -> None:
        """Nothing is predicted."""
        self.wanted: dict[int, Tensor] = {}
        self.columns = torch.zeros(self.shape, dtype=torch.float64)

    def predict(self, predictor: LookupPredictor, leaves: Sequence[Tensor]) -> None:
        """A batch with these tensors is predicted to be looked up as those before it were; no tensors: nothing is."""
        self.clear()
        ranks, columns = self.shape
        nothing, nbytes = [0] * ranks, 0
        counts = [nothing] * (columns - FIRST_COUNT)
        for index, table in enumerate(self.tables):
            for bit, keys in enumerate(predictor.predict(table, leaves, self.each), index * self.each):
                self.wanted[bit], counts[bit] = keys, table.ownership.counts(keys)
                nbytes += keys.numel() * table.row_bytes
        bits = sum(1 << bit for bit in self.wanted)
        told = zip(nothing, nothing, [bits] * ranks, [nbytes] * ranks, *counts, strict=True)
        self.columns = torch.tensor(list(told), dtype=torch.float64)
