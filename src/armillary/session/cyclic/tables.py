"""The tables that a cyclic plan keeps by row: what speaks against them, the order of their look-ups, their making."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row, is_by_row
from armillary.facts.plan import Group, Plan
from armillary.facts.untouched import untouched
from armillary.runtime.channel import Requests
from armillary.runtime.cyclic.stage_tables import OwnedTable, StageTables, Tables
from armillary.runtime.hybrid.look_ups import LookUps
from armillary.runtime.hybrid.prefetch import NoPrefetch
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.partition.stages import Stage
from armillary.runtime.profiling.whole_table import handle_of_whole
from armillary.runtime.transport import Transport
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.rows import refuse_rows
from armillary.session.tables import make_table, put_handle
from armillary.session.train_job import TrainJob
from armillary.session.validation import row_complaints

__all__ = ["RunTables", "look_up_orders", "make_tables", "table_complaints", "table_groups"]


@dataclass(frozen=True, eq=False)
class RunTables:
    """Of one run. by_stage: of the stages that read some. look_ups: of the newest rows, when nothing is under way."""

    by_name: Mapping[str, RowTable] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    by_stage: Tables = field(default_factory=dict)
    look_ups: LookUps | None = None


def table_groups(plan: Plan) -> list[Group]:
    """The groups whose rows are spread over the ranks."""
    return [group for group in plan.groups if is_by_row(group.exchange)]


def table_complaints(
    plan: Plan, options: ScheduleOptions, trainable: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> Iterator[str]:
    """What speaks against a plan's tables, with the remedy."""
    for group in table_groups(plan):
        try:
            refuse_rows(options, group.parameters, plan.workers)
        except ValueError as error:
            yield str(error)
        yield from row_complaints(group, trainable[group.parameters[0]], optimizer)
        assert group.exchange is not None
        exchange = build_row(group.exchange.name, **group.exchange.options)
        if exchange.placement != "row_sharded" or exchange.push_requests > 1:
            yield (
                f"group {group.name!r} goes by {group.exchange}; under this schedule rows go straight to one "
                f"owner and back: take an exchange that does so, or plan the table without rows"
            )
        if group.prefetch != "none":
            yield (
                f"group {group.name!r}: prefetch={group.prefetch!r} is for loops over run.batches; this "
                f"schedule owns its loop: set it to 'none'"
            )


def look_up_orders(stages: Sequence[Stage], names: Sequence[str], model: nn.Module, value: Any) -> list[list[str]]:
    """By stage, the names of the tables in the order in which its forward looks them up, on one value.

    Raises:
        NotImplementedError: a table is read in another way than by row.
    """
    orders: list[list[str]] = []
    with untouched(model), torch.no_grad():
        for stage in stages:
            order: list[str] = []
            local = {name: stage.names[name] for name in stage.names if stage.names[name] in names}
            parameters = dict(stage.module.named_parameters())
            handles: dict[str, Tensor] = {}
            for name, title in local.items():
                handles[name] = handle_of_whole(title, parameters[name], order)
            value = functional_call(stage.module, handles, (value,))
            orders.append(order)
    return orders


def make_tables(
    plan: Plan,
    job: TrainJob,
    orders: Sequence[Sequence[str]],
    divisor: int,
    transport: Transport,
    requests: Requests,
) -> RunTables:
    """Takes a plan's tables out of model and optimizer; every rank keeps the rows it owns.

    Args:
        divisor: micro-batches of a step, those of all ranks.

    Raises:
        ValueError: ranks would look tables up in different orders.
    """
    groups = table_groups(plan)
    if not groups:
        return RunTables()
    _refuse_other_orders(orders, transport)
    named, optimizer = dict(job.model.named_parameters()), job.optimizer
    owned: dict[int, list[OwnedTable]] = {}
    by_name: dict[str, RowTable] = {}
    held: dict[str, Held] = {}
    for group in groups:
        name = group.parameters[0]
        by_name[name], held[name] = make_table(group, named[name], optimizer, transport)
        put_handle(named[name], by_name[name])
        owned.setdefault(group.stage, []).append(OwnedTable(by_name[name], held[name], group.is_lazy))
    look_ups = LookUps(list(by_name.values()), transport, _no_gradient, NoPrefetch())
    for table in by_name.values():
        table.reads = look_ups.read
    by_stage = {}
    for j, tables in sorted(owned.items()):
        numbers = {one.table.name: number for number, one in enumerate(tables)}
        order = [numbers[name] for name in orders[j]]
        by_stage[j] = StageTables(j, tables, order, divisor, optimizer, requests)
    return RunTables(by_name, held, by_stage, look_ups)


def _refuse_other_orders(orders: Sequence[Sequence[str]], transport: Transport) -> None:
    everyones = transport.share([list(order) for order in orders])
    if any(theirs != everyones[0] for theirs in everyones):
        raise ValueError(
            f"attach: ranks look row-sharded tables up in different orders, by rank and stage: {everyones}; give every "
            f"rank an example of the same form"
        )


def _no_gradient(table: RowTable) -> None:
    raise AssertionError(f"{table.name}: a read of the newest rows got a gradient")
