"""Puts a plan to work on a model and its optimizer; the user's training loop stays as it was.

`attach` refuses what it cannot carry out, before the first step: a plan for another model or number of workers, ranks
that hold different plans or models, an optimizer that mixes rows on a row-sharded table.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, build_row, row_exchanges
from armillary.facts.plan import Group, Plan, model_fingerprint
from armillary.runtime.agreement import begin_alike
from armillary.runtime.bucket import Bucket
from armillary.runtime.executor import DenseUnit, Executor, RowUnit
from armillary.runtime.handle import TableHandle
from armillary.runtime.row_update import Held, leaves_untouched_rows, replace_parameter, steps_by_row
from armillary.runtime.table import RowTable
from armillary.runtime.transport import Transport
from armillary.session.run import Run

__all__ = ["attach"]


def attach(plan: Plan, model: nn.Module, optimizer: Optimizer, *, scaler: Any = None, check_order: bool = False) -> Run:
    """Carries out `plan`: from now on every backward ends with final gradients on every worker.

    Args:
        plan: made for this model and number of workers.
        model: an ordinary module on this rank; row-sharded tables in it become handles that are read by row.
        optimizer: over the model's parameters; keeps its class and options, and holds this rank's rows of the tables.
        scaler: the loop's GradScaler, if it has one: ranks then agree on skipped steps.
        check_order: compare every request across ranks before it is made (slow; finds ranks out of order).

    Raises:
        ValueError: the plan, the model or the optimizer do not fit; the message says how to mend it.
    """
    transport = Transport(plan.workers_per_node, check_order)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _refuse_misfit(plan, trainable, transport)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    begin_alike(tensors, transport)
    units: list[DenseUnit | RowUnit] = []
    held: dict[str, Held] = {}
    for group in plan.groups:
        if group.exchange.name in row_exchanges():
            name = group.parameters[0]
            table, held[name] = _table(group, trainable[name], optimizer, transport)
            _put_handle(model, trainable[name], table)
            units.append(RowUnit(group.name, table))
        else:
            bucket = Bucket([trainable[name] for name in group.parameters], plan.mean == "weights")
            exchange = build_dense(group.exchange.name, **group.exchange.options)
            units.append(DenseUnit(group.name, bucket, exchange))
    executor = Executor(units, transport, plan.mean)
    return Run(plan, model, optimizer, executor, held, scaler)


def _refuse_misfit(plan: Plan, trainable: dict[str, nn.Parameter], transport: Transport) -> None:
    if plan.workers != transport.place.workers:
        raise ValueError(
            f"attach: the plan is for {plan.workers} workers, this job has {transport.place.workers}; plan again, "
            f"or launch with --nproc-per-node {plan.workers}"
        )
    if plan.schedule.name != "simultaneous":
        raise ValueError(f"attach: schedule {plan.schedule} owns the loop; drive it with its own runner")
    missing, extra = (
        sorted(set(plan.parameters) - set(trainable)),
        sorted(set(trainable) - set(plan.parameters)),
    )
    if missing or extra:
        raise ValueError(
            f"attach: the plan was made for another model: it has {missing or 'nothing'} which this one does not train "
            f"and misses {extra or 'nothing'}; plan again for this model"
        )
    mine = model_fingerprint((name, tuple(p.shape), _dtype(p)) for name, p in trainable.items())
    if mine != plan.model_fingerprint:
        raise ValueError(
            f"attach: the plan was made for model {plan.model_fingerprint}, this is {mine}: the same names with "
            "other shapes or dtypes; plan again for this model"
        )
    plans = transport.share(hashlib.sha256(plan.to_json().encode()).hexdigest()[:12])
    if len(set(plans)) > 1:
        listing = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(plans))
        raise ValueError(
            f"attach: ranks hold different plans ({listing}); plan on one rank and give all of them the file"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _table(group: Group, parameter: nn.Parameter, optimizer: Optimizer, transport: Transport) -> tuple[RowTable, Held]:
    name = group.parameters[0]
    options = next((options for options in optimizer.param_groups if _holds(options["params"], parameter)), None)
    if options is None:
        raise ValueError(
            f"attach: {name!r} is exchanged by row but the optimizer does not hold it; freeze it, or add it"
        )
    if group.placement == "row_sharded" and not steps_by_row(optimizer, options):
        raise ValueError(
            f"attach: {name!r} is row-sharded but {type(optimizer).__name__} steps a matrix whole differently from the "
            f"same matrix split by row; use an element-wise optimizer, or plan with {{{name!r}: 'replicated'}}"
        )
    exchange = build_row(group.exchange.name, **group.exchange.options)
    has_window = group.update == "lazy" or leaves_untouched_rows(optimizer, options)
    table = RowTable.owning(
        parameter, exchange, transport.place, name=name, has_window=has_window, requires_grad=True,
        reads=_unattached, norms=_unattached,
    )  # fmt: skip
    return table, replace_parameter(optimizer, parameter, table)


def _holds(parameters: Iterable[Tensor], wanted: Tensor) -> bool:
    return any(parameter is wanted for parameter in parameters)


def _unattached(*_: Any) -> Any:
    raise AssertionError("the executor has not taken the table yet")


def _put_handle(model: nn.Module, parameter: nn.Parameter, table: RowTable) -> None:
    """Every module that holds the parameter (tied weights: several) holds the one handle from now on."""
    handle = TableHandle(table, parameter, requires_grad=True)
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held is parameter:
                module._parameters[name] = handle  # type: ignore[assignment]
    with torch.no_grad():
        parameter.grad = None
