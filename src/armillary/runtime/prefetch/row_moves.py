"""Which rows of a table moved since rows of it were sent before a step."""

import torch
from torch import Tensor

from armillary.runtime.hybrid.table import RowTable

__all__ = ["RowMoves"]


class RowMoves:
    """Of one table's shard. It listens to what is written by row (`RowTable.on_written`); any other write to the shard
    may have moved all rows."""

    def __init__(self, table: RowTable):
        self.table = table
        self.forget()
        table.on_written = lambda _, rows, before: self._written(rows, before)

    def forget(self) -> None:
        """Nothing has moved."""
        self.moved, self.version = torch.empty(0, dtype=torch.int64), self.table.shard._version

    def _written(self, rows: Tensor | None, before: int) -> None:
        """rows: local ones that moved; None: values were swapped, and will be back before anybody reads them."""
        shard = self.table.shard
        if before == self.version:  # nothing else has written to it
            self.version = shard._version
        if rows is not None:
            self.moved = torch.cat([self.moved.to(rows), rows]).unique()

    def have_moved(self, rows: Tensor) -> bool:
        """Whether any of these local rows has, since `forget`."""
        shard = self.table.shard
        if not len(rows) or (shard._version == self.version and not len(self.moved)):
            return False
        return shard._version != self.version or bool(torch.isin(rows, self.moved).any())
