"""An optimizer's state by parameter name, whether a table's rows are in the optimizer, beside it, or spread out.

`torch.optim` numbers parameters in the order they were given; plans change none of that order, but what the optimizer
holds for a table is this rank's shard, or a window (`row_update.py`). Here a table's state is told apart into what is
shaped like its rows and the rest (Adam's step count), which is the same on every rank.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable

__all__ = ["TableState", "by_index", "by_name", "parameter_names", "plain", "table_state"]


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
