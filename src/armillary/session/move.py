"""Moves tables of a run to other owners between two steps, with all that the optimizer keeps of their rows.

Rows go to contiguous blocks and from there to their new owners, by the round trip that a checkpoint makes, without the
disk. No value is computed, so training goes on as if the rows had always lived there.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from armillary.exchanges.exchange import build_row
from armillary.facts.plan import Choice
from armillary.runtime.checkpointing.row_blocks import equal_spans, from_spans, to_spans
from armillary.runtime.first_error import FirstError
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.transport import Transport
from armillary.session.engines.user_loop import UserLoop
from armillary.session.row_tensors import row_tensors

__all__ = ["move", "unfinished"]

GRADIENT, AVERAGE = ".grad", ".average "  # no names of an optimizer's entries


def unfinished(run: UserLoop) -> str:
    """What speaks against moving rows now, on this rank; empty between two steps."""
    executor = run.executor
    if executor.is_open or executor.is_owing or executor.is_settled:
        return "gradients wait for their step"
    waiting = [table.name for table in run.tables.values() if table.pending]
    return f"what was read of {', '.join(waiting)} waits for its backward" if waiting else ""


def move(run: UserLoop, owners: Mapping[str, Choice]) -> None:
    """Collective, between two steps on every rank (`unfinished`). Needs memory for one moving table twice.

    Args:
        owners: by table, an exchange that keeps it row-sharded; the same on every rank.

    Raises:
        RuntimeError: a rank has no memory for a table's rows; that table stays.
    """
    with torch.no_grad():
        for name, table in run.tables.items():
            if name in owners:
                _move(run, table, owners[name])


def _move(run: UserLoop, table: RowTable, choice: Choice) -> None:
    exchange, trouble = build_row(choice.name, **choice.options), FirstError("rebalance")
    parts = _parts(run, table)
    arrived: dict[str, Tensor] = {}
    with trouble.kept():
        count = exchange.ownership(table.shape[0], table.place).shard_rows(table.place.rank)
        arrived = {entry: rows.new_empty((count, *table.shape[1:])) for entry, rows in parts.items()}
    trouble.agree(run.transport, f"{table.name} stays where it is")
    target = replace(table, exchange=exchange, shard=arrived[""], pending=[])
    for entry, rows in parts.items():
        _carry(rows, table, arrived[entry], target, run.transport)
    shard, gradient = arrived.pop(""), arrived.pop(GRADIENT, None)
    table.averages = {key: arrived.pop(AVERAGE + key) for key in table.averages}
    table.deal_anew(exchange, shard, gradient)
    for entry, rows in arrived.items():
        if table.has_window:
            run.held[table.name][entry] = rows
        else:
            run.optimizer.state.setdefault(table.parameter, {})[entry] = rows
    run.executor.look_ups.deal_anew()


def _parts(run: UserLoop, table: RowTable) -> dict[str, Tensor]:
    """Everything with the table's rows, the same on every rank: "" is the table, the others go by the optimizer's
    names."""
    tensors = row_tensors({table.name: table}, run.held, run.optimizer, run.transport)
    parts = {tensor.entry: tensor.shard for tensor in tensors}
    parts.update({AVERAGE + key: rows for key, rows in table.averages.items()})
    gradient = table.gradient  # a step leaves it there until the loop drops it
    if run.transport.agree_largest([float(gradient is not None)])[0]:
        parts[GRADIENT] = torch.zeros_like(table.shard) if gradient is None else gradient
    return parts


def _carry(rows: Tensor, table: RowTable, into: Tensor, target: RowTable, transport: Transport) -> None:
    spans = equal_spans(table.shape[0], table.place.workers)
    block = torch.cat([block for _, block in to_spans(rows, table, spans, transport)])
    first = spans[table.place.rank].first
    from_spans(lambda low, high: block[low - first : high - first], into, target, spans, transport)
