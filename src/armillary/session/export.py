"""The plain single-device layout of a run, for plain PyTorch: an explicit collective call.

Rows go back to where one process has them, in blocks; only rank 0 needs memory for whole tables.
"""

import copy
from typing import Any

from torch import Tensor

from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.optimizers import split
from armillary.session.apart import refuse_apart
from armillary.session.job import Job
from armillary.session.row_tensors import RowTensor, gathered, row_tensors

__all__ = ["export", "export_model"]


def export(run: Job) -> dict[str, Any] | None:
    """Collective, between two steps.

    Returns:
        On rank 0, copies on the CPU: {"model": state_dict, "optimizer": state_dict}, which the user's own classes load
        by `load_state_dict` and `torch.save` writes. None on the other ranks. Of several optimizers "optimizer" is a
        list, in the order in which they were given.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
        RuntimeError: ranks no longer hold alike what the plan keeps alike.
    """
    names = run.names
    run.settle()
    refuse_apart(run, "run.export")
    whole: dict[tuple[str, str], Tensor] = {}
    for tensor in row_tensors(run.tables, run.held, run.optimizer, run.transport):
        whole[tensor.table.name, tensor.entry] = gathered(tensor, run.transport)
    with run.rest() as rest:
        if run.rank > 0:
            return None
        model = run.model.state_dict()
        for key, value in model.items():
            model[key] = whole[value.reader.name, ""] if isinstance(value, TableHandle) else _copied(rest["model"][key])
        state: dict[str, dict[str, Any]] = {
            name: {entry: _copied(value) for entry, value in entries.items()}
            for name, entries in rest["optimizer"]["state"].items()
        }
        groups = copy.deepcopy(rest["optimizer"]["param_groups"])
    for (name, entry), rows in whole.items():
        if entry:
            state.setdefault(name, {})[entry] = rows
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    numbered = {numbers[name]: state[name] for name in names if state.get(name)}
    each = split({"state": numbered, "param_groups": groups}, run.optimizer)
    return {"model": model, "optimizer": each[0] if len(each) == 1 else each}


def export_model(run: Job) -> dict[str, Any] | None:
    """Collective, between two steps, where the model holds whole weights: on rank 0 its plain state_dict, copies on the
    CPU, with the values that it holds; None on the other ranks."""
    run.settle()
    tables = [RowTensor(table, "", table.shard) for table in run.tables.values()]
    whole = {tensor.table.name: gathered(tensor, run.transport) for tensor in tables}
    if run.rank > 0:
        return None
    state = run.model.state_dict().items()
    return {key: whole[one.reader.name] if isinstance(one, TableHandle) else _copied(one) for key, one in state}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
