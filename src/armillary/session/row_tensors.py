"""Every tensor of a run that is cut by row: tables, and what the optimizer keeps for each of their rows.

The list is the same on every rank, in the same order, though a rank whose rows were never touched may not have a
state yet that others have: such rows count as zero, as they would begin.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.checkpointing.optimizer_state import table_state
from armillary.runtime.checkpointing.row_blocks import all_on_first, to_spans
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport

__all__ = ["RowTensor", "average_tensors", "gathered", "row_tensors"]


class RowTensor(NamedTuple):
    """entry: name in the optimizer's state, or of a moving average; "" for the table itself. shard: (local rows, *row
    shape)."""

    table: RowTable
    entry: str
    shard: Tensor
    kind: Literal["optimizer", "average"] = "optimizer"

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{self.kind}/{self.table.name}/{self.entry}" if self.entry else f"model/{self.table.name}"


def average_tensors(tables: Mapping[str, RowTable]) -> list[RowTensor]:
    """The moving averages of their rows; the same on every rank."""
    return [RowTensor(t, key, rows, "average") for t in tables.values() for key, rows in sorted(t.averages.items())]


def row_tensors(
    tables: Mapping[str, RowTable], held: Mapping[str, Held], optimizer: Optimizer, transport: Transport
) -> list[RowTensor]:
    """Collective. Widest dtype first, which keeps files aligned. held: see `row_update.py`."""
    found = []
    states = {name: table_state(table, optimizer, held.get(name, {})) for name, table in tables.items()}
    mine = {name: {entry: rows.dtype for entry, rows in state.rows.items()} for name, state in states.items()}
    everyones = transport.share(mine)
    for name, table in tables.items():
        found.append(RowTensor(table, "", table.shard))
        dtypes = {entry: dtype for theirs in everyones for entry, dtype in theirs[name].items()}
        for entry in sorted(dtypes):
            rows = states[name].rows.get(entry)
            if rows is None:
                rows = torch.zeros(table.shard.shape, dtype=dtypes[entry], device=table.shard.device)
            found.append(RowTensor(table, entry, rows))
    return sorted(found, key=lambda tensor: -tensor.shard.dtype.itemsize)


def gathered(tensor: RowTensor, transport: Transport) -> Tensor:
    """Collective: the whole tensor on rank 0, nothing elsewhere; in blocks of rows."""
    place, table = transport.place, tensor.table
    shape = tuple(table.shape) if place.rank == 0 else (0, *table.shape[1:])
    whole = torch.empty(shape, dtype=tensor.shard.dtype)
    for first, block in to_spans(tensor.shard, table, all_on_first(table.shape[0], place.workers), transport):
        whole[first : first + len(block)] = block
    return whole
