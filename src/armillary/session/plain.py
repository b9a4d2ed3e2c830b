"""Takes tables out of the model and the optimizer again: the same parameter objects are plain, as before attach.

Rows are gathered whole on every rank. Where they are not to be, the handles stay in the model and say, when they are
read, that nobody serves them any more.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.checkpointing.optimizer_state import table_state
from armillary.runtime.first_error import FirstError
from armillary.runtime.hybrid.identity import become, why_fixed
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport
from armillary.session.row_tensors import gathered, row_tensors

__all__ = ["put_back", "refuse_reads"]


def put_back(
    optimizer: Optimizer,
    tables: Mapping[str, RowTable],
    held: Mapping[str, Held],
    handles: Mapping[str, nn.Parameter],
    transport: Transport,
) -> None:
    """Collective, between two steps. Every rank needs memory for whole tables and their optimizer state.

    Args:
        handles: the parameter objects that are the tables' handles, by name.

    Raises:
        ValueError: some rank holds something that keeps a handle from becoming a plain parameter. Nothing was changed.
    """
    if not tables:
        return
    trouble = FirstError("close")
    with trouble.kept():
        _refuse_fixed(handles)
    trouble.agree(transport)
    whole: dict[str, dict[str, Tensor]] = {name: {} for name in tables}
    for tensor in row_tensors(tables, held, optimizer, transport):
        rows = gathered(tensor, transport)
        if transport.place.rank > 0:
            rows = torch.empty(tuple(tensor.table.shape), dtype=tensor.shard.dtype)
        transport.spread(rows)
        whole[tensor.table.name][tensor.entry] = rows.to(tensor.shard.device)
    rests = transport.share({name: table_state(table, optimizer, held[name]).rest for name, table in tables.items()})
    for name, table in tables.items():
        rest: dict[str, Any] = next((theirs[name] for theirs in rests if theirs[name]), {})
        parameter = handles[name]
        become(parameter, nn.Parameter(whole[name].pop(""), requires_grad=parameter.requires_grad))
        _replace_in_optimizer(optimizer, table, parameter, {**rest, **whole[name]})


def _refuse_fixed(handles: Mapping[str, nn.Parameter]) -> None:
    for name, handle in handles.items():
        if fixed := why_fixed(handle):
            raise ValueError(f"{name} cannot be a plain parameter again: {fixed}, then close once more")


def _replace_in_optimizer(
    optimizer: Optimizer, table: RowTable, parameter: nn.Parameter, state: Mapping[str, Any]
) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [parameter if there is table.parameter else there for there in group["params"]]
    optimizer.state.pop(table.parameter, None)
    if state:
        optimizer.state[parameter] = dict(state)


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
