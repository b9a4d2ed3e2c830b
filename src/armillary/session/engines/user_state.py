"""What a user's loop has learnt, besides rows, and how many bytes it holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.checkpointing.optimizer_state import by_name, plain, table_state
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.executor import RowUnit
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable

__all__ = ["held_by_group", "rest_of"]


def rest_of(
    model: nn.Module,
    optimizer: Optimizer,
    names: list[str],
    tables: Mapping[str, RowTable],
    held: Mapping[str, Held],
) -> dict[str, Any]:
    """ "model": a state_dict without tables; "optimizer": by name, without rows."""
    rest = by_name(optimizer.state_dict(), names)
    for name, table in tables.items():
        entries = table_state(table, optimizer, held.get(name, {})).rest
        rest["state"].pop(name, None)
        if entries:
            rest["state"][name] = entries
    rest["param_groups"] = [{key: plain(value) for key, value in group.items()} for group in rest["param_groups"]]
    whole = {key: value for key, value in model.state_dict().items() if not isinstance(value, TableHandle)}
    return {"model": whole, "optimizer": rest}


def held_by_group(
    units: Sequence[DenseUnit | RowUnit], optimizer: Optimizer, held: Mapping[str, Held]
) -> dict[str, float]:
    """Bytes of the tensors each group keeps on this rank: weights, gradients, optimizer state. Where weights are sent,
    gradients are kept beside what is sent."""
    found: dict[str, float] = {}
    for unit in units:
        if isinstance(unit, DenseUnit):
            tensors: list[Any] = [unit.bucket.flat, *unit.bucket.parameters, *unit.state.values()]
            owners: list[Tensor] = list(unit.bucket.parameters)
        else:
            table = unit.table
            tensors = [table.shard, table.parameter, table.gradient, *held[table.name].values()]
            owners = [table.parameter]
        for owner in owners:
            tensors += optimizer.state.get(owner, {}).values()
        kept = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
        found[unit.name] = float(sum({one.data_ptr(): one.nbytes() for one in kept}.values()))
        if isinstance(unit, DenseUnit) and unit.exchange.carries == "weights":
            found[unit.name] += sum(one.nbytes for one in unit.parameters)
    return found
