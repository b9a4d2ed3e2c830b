"""Norms of the whole gradients of tables, of which every rank holds its rows: clipping asks for them.

The norms of all tables cost one small all-reduce together, once per step however often they are asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.facts.collectives import summed
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport

__all__ = ["TableNorms"]


class TableNorms:
    """Those that were asked for since the gradients changed.

    serve: looks rows up for ranks that read on their own, until all ask.
    """

    def __init__(self, tables: Sequence[RowTable], transport: Transport, serve: Callable[[], None]) -> None:
        self.tables, self.transport, self._serve = tables, transport, serve
        self.known: dict[tuple[Any, ...], Tensor] = {}

    def forget(self) -> None:
        """There are other gradients."""
        self.known.clear()

    def of(self, table: RowTable, order: float) -> Tensor:
        """Of the whole gradient of a table, on its device. Collective the first time it is asked for."""
        having = [other for other in self.tables if other.gradient is not None]
        versions = tuple((other.name, other.gradient._version) for other in having)  # type: ignore[union-attr]
        key = (order, versions, self.transport.step)
        if key not in self.known:
            with self.transport.within("gradient norm"):
                self._serve()
                self.known = {key: self._norms(having, order)}
        return self.known[key][having.index(table)].to(table.shard)

    def _norms(self, tables: Sequence[RowTable], order: float) -> Tensor:
        """Adds |g|^order over ranks; a table that every rank holds whole is counted on rank 0 alone."""
        mine = [_powered_norm(t, order) if t.is_pulled or self.transport.place.rank == 0 else _nought() for t in tables]
        local = torch.stack(mine)
        if order == float("inf"):
            return torch.tensor(self.transport.agree_largest(local.tolist()), dtype=torch.float64)
        total: Tensor = self.transport.complete(summed(local), "gradient norms")
        return total ** (1.0 / order)


def _powered_norm(table: RowTable, order: float) -> Tensor:
    """|g|^order of the local rows (the largest |g| for order inf), in float64."""
    gradient = table.gradient
    assert gradient is not None
    if not gradient.numel():
        return _nought()
    norm: Tensor = torch.linalg.vector_norm(gradient.double(), order).cpu()
    return norm if order == float("inf") else norm**order


def _nought() -> Tensor:
    return torch.zeros((), dtype=torch.float64)
