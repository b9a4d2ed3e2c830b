"""Makes the tables of a plan, and takes them out of the model and the optimizer again.

A table is the rows owned here, what the optimizer holds of them, and the handle in the model. Taken out, the same
parameter objects are plain: rows are gathered whole on every rank, or the handles stay and refuse to be read.

`row_tensors` lists what is cut by row, the same on every rank. A rank whose rows were never touched may lack a state
that others have: such rows count as zero, as they would begin.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row
from armillary.plans.group import Group
from armillary.tables.handle import TableHandle, become
from armillary.tables.optimizer_state import Held, replace_parameter, table_state
from armillary.tables.optimizer_trial import leaves_untouched_rows, steps_by_row, wants_listed_rows
from armillary.tables.optimizers import holder, options_of
from armillary.tables.reshard import all_on_first, to_spans
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = [
    "RowTensor",
    "WholeParameter",
    "average_tensors",
    "gathered",
    "make_table",
    "put_handle",
    "refuse_reads",
    "row_tensors",
    "whole_tables",
]


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


class WholeParameter(NamedTuple):
    """Of a parameter: its values, and what the optimizer keeps of it."""

    values: Tensor
    state: Mapping[str, Any]


def average_tensors(tables: Mapping[str, RowTable]) -> list[RowTensor]:
    """The moving averages of their rows; the same on every rank."""
    return [RowTensor(t, key, rows, "average") for t in tables.values() for key, rows in sorted(t.averages.items())]


def row_tensors(
    tables: Mapping[str, RowTable], held: Mapping[str, Held], optimizer: Optimizer, transport: Transport
) -> list[RowTensor]:
    """Collective. Widest dtype first, which keeps files aligned. held: see `optimizer_state.py`."""
    for table in tables.values():
        table.catches_up()
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


def whole_tables(
    optimizer: Optimizer, tables: Mapping[str, RowTable], held: Mapping[str, Held], transport: Transport
) -> dict[str, WholeParameter]:
    """Collective, between two steps. Every rank needs memory for whole tables and their optimizer state."""
    if not tables:
        return {}
    values: dict[str, dict[str, Tensor]] = {name: {} for name in tables}
    for tensor in row_tensors(tables, held, optimizer, transport):
        rows = gathered(tensor, transport)
        if transport.place.rank > 0:
            rows = torch.empty(tuple(tensor.table.shape), dtype=tensor.shard.dtype)
        transport.spread(rows)
        values[tensor.table.name][tensor.entry] = rows.to(tensor.shard.device)
    rests = transport.share({name: table_state(table, optimizer, held[name]).rest for name, table in tables.items()})
    rest: dict[str, dict[str, Any]] = {
        name: next((theirs[name] for theirs in rests if theirs[name]), {}) for name in tables
    }
    return {name: WholeParameter(entries.pop(""), {**rest[name], **entries}) for name, entries in values.items()}


def refuse_reads(tables: Iterable[RowTable], optimizer: Optimizer, why: str) -> None:
    """Asks nobody. Reading a table raises from here on; the optimizer steps none of them."""

    def refuse(table: RowTable, ids: Tensor) -> NoReturn:
        raise RuntimeError(f"{table.name}: its rows cannot be read any more: {why}")

    for table in tables:
        table.reads = table.tells = refuse
        table.leave_be()
        table.parameter.grad = None
        for group in optimizer.param_groups:
            group["params"][:] = [there for there in group["params"] if there is not table.parameter]
        optimizer.state.pop(table.parameter, None)


def make_table(
    group: Group, parameter: nn.Parameter, optimizer: Optimizer, transport: Transport, shard: Tensor | None = None
) -> tuple[RowTable, Held]:
    """Whoever runs it must set the table's `reads` (and `norms`, if anybody asks for them).

    Args:
        shard: this rank's rows, where the parameter itself has no values (meta device).
    """
    stepper, options = holder(optimizer, parameter), options_of(optimizer, parameter)
    assert options is not None, group.name
    exchange = build_row(group.own_exchange.name, **group.own_exchange.options)
    has_window = group.is_lazy or (
        steps_by_row(stepper, options, parameter) and leaves_untouched_rows(stepper, options, parameter)
    )
    fields: dict[str, Any] = {
        "name": group.parameters[0], "has_window": has_window, "requires_grad": True,
        "reads": _unattached, "norms": _unattached, "lists_rows": wants_listed_rows(stepper, options, parameter),
    }  # fmt: skip
    if shard is None:
        table = RowTable.owning(parameter, exchange, transport.place, **fields)
    else:
        table = RowTable(shape=parameter.shape, exchange=exchange, place=transport.place, shard=shard, **fields)
    return table, replace_parameter(optimizer, parameter, table)


def _unattached(*_: Any) -> Any:
    raise AssertionError("nobody has taken the table yet")


def put_handle(parameter: nn.Parameter, table: RowTable) -> None:
    """The parameter object is the handle from now on, for everyone who holds it."""
    become(parameter, TableHandle(table, table.shard, requires_grad=True))
