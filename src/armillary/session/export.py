"""The plain single-device layout of a run, for plain PyTorch: an explicit collective call.

Rows go back to where one process has them, in blocks; only rank 0 needs memory for whole tables.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.saving.optimizer_state import parameter_names, table_state
from armillary.session.cyclic.drive import CyclicRun
from armillary.session.cyclic.state import export_cyclic
from armillary.session.row_tensors import gathered, row_tensors
from armillary.session.run import Run

__all__ = ["export"]


def export(run: Run | CyclicRun) -> dict[str, Any] | None:
    """Collective, between two steps; drains a run that `drive` made.

    Returns:
        On rank 0, copies on the CPU: {"model": state_dict, "optimizer": state_dict}, which the user's own classes load
        by `load_state_dict` and `torch.save` writes. None on the other ranks.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not.
    """
    if isinstance(run, CyclicRun):
        return export_cyclic(run)
    names = parameter_names(run.model, run.optimizer, run.tables)
    run.executor.look_ups.serve_until("idle")
    whole: dict[tuple[str, str], Tensor] = {}
    for tensor in row_tensors(run.tables, run.held, run.optimizer, run.transport):
        whole[tensor.table.name, tensor.entry] = gathered(tensor, run.transport)
    if run.rank > 0:
        return None
    model = run.model.state_dict()
    for key, value in model.items():
        model[key] = whole[value.reader.name, ""] if isinstance(value, TableHandle) else _copied(value)
    optimizer = run.optimizer.state_dict()
    state = {number: _copied_all(entries) for number, entries in optimizer["state"].items()}
    for number, name in enumerate(names):
        table = run.tables.get(name)
        if table is None:
            continue
        rest = table_state(table, run.optimizer, run.held.get(name, {})).rest
        rows = {entry: rows for (owner, entry), rows in whole.items() if owner == name and entry}
        state[number] = {**_copied_all(rest), **rows}
    optimizer["state"] = {number: state[number] for number in sorted(state) if state[number]}
    optimizer["param_groups"] = copy.deepcopy(optimizer["param_groups"])
    return {"model": model, "optimizer": optimizer}


def _copied_all(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {entry: _copied(value) for entry, value in entries.items()}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
