"""Makes the tables of a plan: rows owned here, what the optimizer holds of them, and the handle in the model."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row
from armillary.facts.plan import Group
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.identity import become
from armillary.runtime.hybrid.optimizer_trial import leaves_untouched_rows, steps_by_row, wants_listed_rows
from armillary.runtime.hybrid.optimizer_twin import options_of
from armillary.runtime.hybrid.optimizers import holder
from armillary.runtime.hybrid.row_update import Held, replace_parameter
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport

__all__ = ["make_table", "put_handle"]


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
