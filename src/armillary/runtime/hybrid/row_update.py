"""Runs the user's optimizer on some rows of a table: where the row lives, and exactly as in one process where that is
said.

A window update gathers the touched rows of weight and optimizer state, lets the optimizer step on them, and puts them
back. That is exact when rows without gradient would not have moved, which a trial tells (`optimizer_trial.py`).
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.hybrid.table import RowTable

__all__ = ["Held", "close_window", "open_window", "replace_parameter"]

Held = dict[str, Tensor]  # optimizer state of a whole shard: name -> (local rows, *row shape)


def open_window(table: RowTable, optimizer: Optimizer, held: Held) -> None:
    """Puts the state of the window's rows where the optimizer looks for it; `held` keeps the shard's."""
    if table.window_rows is None:
        return
    state = optimizer.state.get(table.parameter, {})
    for name, whole in held.items():
        state[name] = whole.index_select(0, table.window_rows)


def close_window(table: RowTable, optimizer: Optimizer, held: Held) -> None:
    """Puts rows and state back into the shard and empties the window. New state begins as zero rows."""
    rows = table.window_rows
    if rows is None:
        return
    window = table.parameter.detach()
    table.put_back(rows, window)
    state = optimizer.state.get(table.parameter, {})
    for name, value in list(state.items()):
        if not isinstance(value, Tensor) or value.shape != window.shape or value.dim() == 0:
            continue
        if name not in held:
            held[name] = value.new_zeros(table.shard.shape)
        held[name].index_copy_(0, rows, value)
        state[name] = value[:0]
    table.window_rows = None
    gradient = table.parameter.grad
    table.parameter.grad = None
    table.parameter.data = window[:0].clone()
    del gradient


def replace_parameter(optimizer: Optimizer, old: Tensor, table: RowTable) -> Held:
    """Makes the optimizer hold the table's parameter in place of `old`, with the state of the rows owned here.

    Returns:
        The shard's state, for `open_window`; empty where the optimizer holds the shard itself.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [table.parameter if parameter is old else parameter for parameter in group["params"]]
    if old not in optimizer.state:
        return {}
    state = optimizer.state.pop(old)
    held: Held = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape and value.dim() > 0:
            mine = value.clone() if not table.is_pulled else value[_owned(table)]
            if not table.has_window:
                state[name] = mine
            else:
                held[name], state[name] = mine, mine[:0].clone()
    optimizer.state[table.parameter] = state
    return held


def _owned(table: RowTable) -> Tensor:
    if table.place.rank not in table.ownership.owners:
        return torch.empty(0, dtype=torch.int64)
    return table.ownership.ids(table.place.rank)
