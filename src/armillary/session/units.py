"""What carries out the groups of a plan on this rank, behind the user's own loop: made from a plain model and
optimizer, at attach and whenever a run moves to another plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.facts.plan import Plan
from armillary.runtime.hybrid.dense_unit import DenseUnit, dense_unit
from armillary.runtime.hybrid.executor import Executor, RowUnit
from armillary.runtime.hybrid.optimizer_trial import takes_listed_rows
from armillary.runtime.hybrid.optimizer_twin import options_of
from armillary.runtime.hybrid.optimizers import holder
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.transport import Transport
from armillary.session.finite import FiniteCheck
from armillary.session.first_batches import FirstBatches
from armillary.session.prefetch import prefetch_of
from armillary.session.tables import make_table, put_handle
from armillary.session.train_job import TrainJob

__all__ = ["Units", "units_of"]

NO_ROWS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Units:
    """
    Args of note:
        held: optimizer state of the tables of which the optimizer sees a window only, by name.
        handles: the parameter objects that are the tables' handles, by name.
    """

    executor: Executor
    held: dict[str, Held] = field(default_factory=dict)
    handles: Mapping[str, nn.Parameter] = field(default_factory=dict)


def units_of(
    plan: Plan, job: TrainJob, transport: Transport, first: FirstBatches, shards: Mapping[str, Tensor] = NO_ROWS
) -> Units:
    """Model and optimizer hold tables from here on. No value is computed.

    Args:
        first: compares what ranks were given, when gradients are final.
        shards: this rank's rows of the tables that have no values yet (meta device), by name.
    """
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    units: list[DenseUnit | RowUnit] = []
    rewritten = _rewritten(job)
    held: dict[str, Held] = {}
    handles: dict[str, nn.Parameter] = {}
    for group in plan.groups:
        if group.own_exchange.name in row_exchanges():
            name = group.parameters[0]
            handles[name] = trainable[name]
            table, held[name] = make_table(group, trainable[name], job.optimizer, transport, shards.get(name))
            put_handle(trainable[name], table)
            units.append(RowUnit(group.name, table))
        else:
            members = {name: trainable[name] for name in group.parameters}
            exchange = build_dense(group.own_exchange.name, **group.own_exchange.options)
            listable = [name for name in group.parameters if exchange.takes_rows and _lists(job, trainable[name])]
            unit = dense_unit(group.name, members, exchange, transport.place, listable)
            unit.rewritten = rewritten.intersection(group.parameters)
            units.append(unit)
    scaler = job.scaler
    scale = partial(float, 1.0) if scaler is None or not scaler.is_enabled() else scaler.get_scale
    prefetch = prefetch_of(plan, [unit.table for unit in units if isinstance(unit, RowUnit)], transport)
    executor = Executor(units, transport, plan.mean, first.compare, scale, prefetch)
    if job.check_finite:
        finite = FiniteCheck(transport)
        executor.on_own, executor.on_settled = finite.look, finite.and_then(first.compare)
    return Units(executor, held, handles)


def _rewritten(job: TrainJob) -> frozenset[str]:
    """Parameters into which forwards write, as modules say (max_norm), or as a profile saw."""
    profiled = () if job.profile is None else job.profile.parameters
    normed = {one.weight for one in job.model.modules() if getattr(one, "max_norm", None) and hasattr(one, "weight")}
    names = {name for name, parameter in job.model.named_parameters() if parameter in normed}
    return frozenset(names | {fact.name for fact in profiled if fact.is_rewritten})


def _lists(job: TrainJob, parameter: nn.Parameter) -> bool:
    """Whether its optimizer takes its gradient as rows."""
    optimizer = holder(job.optimizer, parameter)
    options = None if optimizer is None else options_of(optimizer, parameter)
    return optimizer is not None and options is not None and takes_listed_rows(optimizer, options, parameter)
