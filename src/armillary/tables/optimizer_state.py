"""The user's optimizer on some rows of a table, and its state by parameter name wherever rows are kept.

A window update gathers the touched rows of weight and optimizer state, lets the optimizer step on them, and puts them
back. That is exact where rows without gradient would not have moved (`tables/optimizer_trial.py`).

`torch.optim` numbers parameters in the order they were given. Plans leave that order, but what the optimizer holds for
a table is this rank's shard or a window. So state is told apart into what is shaped like rows, and the rest (Adam's
step count), which is the same on every rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.tables.table import RowTable

__all__ = [
    "Held",
    "TableState",
    "Windowed",
    "by_index",
    "by_name",
    "close_window",
    "named_groups",
    "open_window",
    "parameter_names",
    "plain",
    "replace_parameter",
    "table_state",
]

Held = dict[str, Tensor]  # optimizer state of a whole shard: name -> (local rows, *row shape)


class Windowed(Protocol):
    """Rows of a table of which the optimizer sees some at a time: `window_rows` of `shard`, by `parameter`."""

    shard: Tensor
    parameter: nn.Parameter
    window_rows: Tensor | None

    def put_back(self, rows: Tensor, values: Tensor) -> None: ...


def open_window(table: Windowed, optimizer: Optimizer, held: Held) -> None:
    """Puts the state of the window's rows where the optimizer looks for it; `held` keeps the shard's."""
    if table.window_rows is None:
        return
    state = optimizer.state.get(table.parameter, {})  # whose state was cleared begins anew
    for name, whole in held.items():
        state[name] = whole.index_select(0, table.window_rows)


def close_window(table: Windowed, optimizer: Optimizer, held: Held) -> None:
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


class TableState(NamedTuple):
    """Optimizer state of one table on this rank. rows: name -> (local rows, *row shape)."""

    rows: dict[str, Tensor]
    rest: dict[str, Any]


def table_state(table: RowTable, optimizer: Optimizer, held: Held) -> TableState:
    """What the optimizer keeps of a table, wherever it keeps it."""
    state = optimizer.state.get(table.parameter, {})
    if table.has_window:
        return TableState(dict(held), {key: value for key, value in state.items() if key not in held})
    rows = {key: value for key, value in state.items() if is_row_shaped(value, table.shard)}
    return TableState(rows, {key: value for key, value in state.items() if key not in rows})


def is_row_shaped(value: Any, like: Any) -> bool:
    """Whether a value of the state has one entry per entry of the parameter. `like`: anything with a shape."""
    return hasattr(value, "shape") and tuple(value.shape) == tuple(like.shape) and len(value.shape) > 0


def parameter_names(model: nn.Module, optimizer: Optimizer, tables: Mapping[str, RowTable]) -> list[str]:
    """Names of the optimizer's parameters in its own order, in which `torch.optim` numbers them.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names.update({id(table.parameter): name for name, table in tables.items()})
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"checkpoint: parameter {place} of the optimizer's group {number}, shape {tuple(parameter.shape)}, "
                    "is none of the model's; give the optimizer parameters of the attached model only"
                )
            found.append(names[id(parameter)])
    return found


def plain(option: Any) -> Any:
    """An option of an optimizer with numbers of Python for those of numpy, which are not loaded without running code;
    a learning rate comes to be one by a scheduler that computes with numpy."""
    if isinstance(option, np.generic):
        return option.item()
    return type(option)(map(plain, option)) if type(option) in (list, tuple) else option


def by_name(state_dict: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state_dict with names for numbers.

    Raises:
        ValueError: it numbers more or fewer parameters than there are names.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(names):
        raise ValueError(
            f"checkpoint: the saved optimizer has {len(numbers)} parameters, this one {len(names)}; build it "
            "over the same parameters in the same order"
        )
    name_of = dict(zip(numbers, names, strict=True))
    groups = [{**group, "params": [name_of[n] for n in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {name_of[n]: dict(value) for n, value in state_dict["state"].items()}, "param_groups": groups}


def named_groups(optimizer: Optimizer, names: Sequence[str], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """The options of every group, as they are now, with the names of its parameters. sizes: how many each has."""
    rest = iter(names)
    return [
        {
            **{key: plain(value) for key, value in group.items() if key not in ("params", "param_names")},
            "params": list(islice(rest, size)),
        }
        for group, size in zip(optimizer.param_groups, sizes)
    ]


def by_index(named: Mapping[str, Any], names: list[str], optimizer: Optimizer) -> dict[str, Any]:
    """The state_dict that `optimizer.load_state_dict` wants, from one `by_name`; groups keep this optimizer's order.

    Raises:
        ValueError: the saved groups hold other parameters than this optimizer's.
    """
    rest = iter(names)
    mine = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["params"]) for group in named["param_groups"]]
    if [sorted(group) for group in mine] != [sorted(group) for group in saved]:
        raise ValueError(
            f"checkpoint: the saved optimizer's groups hold {saved}, this optimizer's {mine}; build it as it was, or "
            "load the model alone"
        )
    number_of = {name: number for number, name in enumerate(names)}
    groups = [
        {**options, "params": [number_of[name] for name in group]}
        for options, group in zip(named["param_groups"], mine, strict=True)
    ]
    return {"state": {number_of[name]: value for name, value in named["state"].items()}, "param_groups": groups}
