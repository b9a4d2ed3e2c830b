"""Every tensor of a run that is cut by row: tables, and what the optimizer keeps for each of their rows.

The list is the same on every rank, in the same order, though a rank whose rows were never touched may not have a
state yet that others have: such rows count as zero, as they would begin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.saving.optimizer_state import table_state
from armillary.session.run import Run

__all__ = ["RowTensor", "row_tensors"]


class RowTensor(NamedTuple):
    """entry: name in the optimizer's state, or "" for the table itself. shard: (local rows, *row shape)."""

    table: RowTable
    entry: str
    shard: Tensor

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"optimizer/{self.table.name}/{self.entry}" if self.entry else f"model/{self.table.name}"


def row_tensors(run: Run) -> list[RowTensor]:
    """Collective. Widest dtype first, which keeps files aligned."""
    found = []
    states = {name: table_state(table, run.optimizer, run.held.get(name, {})) for name, table in run.tables.items()}
    mine = {name: {entry: rows.dtype for entry, rows in state.rows.items()} for name, state in states.items()}
    everyones = run.transport.share(mine)
    for name, table in run.tables.items():
        found.append(RowTensor(table, "", table.shard))
        dtypes = {entry: dtype for theirs in everyones for entry, dtype in theirs[name].items()}
        for entry in sorted(dtypes):
            rows = states[name].rows.get(entry)
            if rows is None:
                rows = torch.zeros(table.shard.shape, dtype=dtypes[entry], device=table.shard.device)
            found.append(RowTensor(table, entry, rows))
    return sorted(found, key=lambda tensor: -tensor.shard.dtype.itemsize)
