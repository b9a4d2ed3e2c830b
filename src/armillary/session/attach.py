"""Puts a plan to work on a model and its optimizer; the user's training loop stays as it was.

`attach` refuses what it cannot carry out, before the first step: a plan for another model or number of workers, ranks
that hold different plans or models, an optimizer that mixes rows on a row-sharded table.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, build_row, row_exchanges
from armillary.facts.plan import Group, Plan
from armillary.runtime.agreement import begin_alike
from armillary.runtime.hybrid.bucket import Bucket
from armillary.runtime.hybrid.executor import DenseUnit, Executor, RowUnit
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.row_update import Held, leaves_untouched_rows, replace_parameter, steps_by_row
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport
from armillary.session.materialise import begin_optimizer_state, materialise
from armillary.session.misfit import misfit, options_of, refuse_on_every_rank
from armillary.session.run import Run

__all__ = ["attach"]


def attach(plan: Plan, model: nn.Module, optimizer: Optimizer, *, scaler: Any = None, check_order: bool = False) -> Run:
    """Carries out `plan`: from now on every backward ends with final gradients on every worker.

    Args:
        plan: made for this model and number of workers.
        model: an ordinary module on this rank; row-sharded tables in it become handles that are read by row. It may
            be on the meta device: then it gets its values here (see `materialise`).
        optimizer: over the model's parameters; keeps its class and options, and holds this rank's rows of the tables.
        scaler: the loop's GradScaler, if it has one: ranks then agree on skipped steps.
        check_order: compare every request across ranks before it is made (slow; finds ranks out of order).

    Raises:
        ValueError: the plan, the model or the optimizer do not fit; the message says how to mend it.
    """
    transport = Transport(plan.workers_per_node, check_order)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    begin_optimizer_state(optimizer)
    complaint = misfit(plan, trainable, optimizer, transport.place.workers)
    refuse_on_every_rank("attach", plan, complaint, transport)
    shards = materialise(model, optimizer, plan, transport)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    begin_alike({name: tensor for name, tensor in tensors.items() if name not in shards}, transport)
    units: list[DenseUnit | RowUnit] = []
    held: dict[str, Held] = {}
    for group in plan.groups:
        if group.exchange.name in row_exchanges():
            name = group.parameters[0]
            table, held[name] = _table(group, trainable[name], optimizer, transport, shards.get(name))
            _put_handle(model, trainable[name], table)
            units.append(RowUnit(group.name, table))
        else:
            bucket = Bucket([trainable[name] for name in group.parameters], plan.mean == "weights")
            exchange = build_dense(group.exchange.name, **group.exchange.options)
            units.append(DenseUnit(group.name, bucket, exchange))
    executor = Executor(units, transport, plan.mean)
    return Run(plan, model, optimizer, executor, held, scaler)


def _table(
    group: Group, parameter: nn.Parameter, optimizer: Optimizer, transport: Transport, shard: Tensor | None
) -> tuple[RowTable, Held]:
    """shard: this rank's rows, where the parameter itself has no values (meta device)."""
    options = options_of(optimizer, parameter)
    assert options is not None, group.name
    exchange = build_row(group.exchange.name, **group.exchange.options)
    has_window = group.update == "lazy" or (
        steps_by_row(optimizer, options) and leaves_untouched_rows(optimizer, options)
    )
    fields: dict[str, Any] = {
        "name": group.parameters[0], "has_window": has_window, "requires_grad": True,
        "look_ahead": group.look_ahead,
        "reads": _unattached, "norms": _unattached,
    }  # fmt: skip
    if shard is None:
        table = RowTable.owning(parameter, exchange, transport.place, **fields)
    else:
        table = RowTable(shape=parameter.shape, exchange=exchange, place=transport.place, shard=shard, **fields)
    return table, replace_parameter(optimizer, parameter, table)


def _unattached(*_: Any) -> Any:
    raise AssertionError("the executor has not taken the table yet")


def _put_handle(model: nn.Module, parameter: nn.Parameter, table: RowTable) -> None:
    """Every module that holds the parameter (tied weights: several) holds the one handle from now on."""
    handle = TableHandle(table, table.shard, requires_grad=True)
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held is parameter:
                module._parameters[name] = handle  # type: ignore[assignment]
    with torch.no_grad():
        parameter.grad = None
