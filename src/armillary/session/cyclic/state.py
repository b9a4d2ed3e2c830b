"""What a cyclic run has learnt, in plain single-device format, and back: for any mode and number of processes.

A checkpoint begins with a drain, which belongs to the schedule: the run goes on as if it had been resumed from it. The
folder is the one `session/checkpoint.py` writes, without row files; so runs under other plans open it, too.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.saving.checkpoint import Marker, mark, new_folder, next_serial, prune
from armillary.runtime.saving.optimizer_state import by_index, by_name, parameter_names, table_state
from armillary.runtime.saving.row_file import FileRecord, StoredRows, digest, sync_folder
from armillary.runtime.saving.saved import REST, open_saved, read_rows
from armillary.schedules.cyclic_modes import RINGS
from armillary.session.cyclic.drive import CyclicRun
from armillary.session.rank_zero import by_rank_zero
from armillary.session.row_tensors import gathered, row_tensors

__all__ = ["export_cyclic", "load_plain", "save_cyclic", "whole_rows"]


def export_cyclic(run: CyclicRun) -> dict[str, Any] | None:
    """Collective, between two steps; drains the run.

    Returns:
        On rank 0, copies on the CPU: {"model": state_dict, "optimizer": state_dict} as one process would have them;
        None elsewhere. Buffers are rank 0's (in a ring every worker has running statistics of its own). Only rank 0
        needs memory for whole tables.
    """
    run.drain()
    state: dict[int, dict[str, Any]] = {}
    mine = _states(run)
    for stage, owner in zip(run.stages, run.owners, strict=True):  # one stage at a time on the network
        held = {name: mine[name] for name in stage.names.values() if name in mine}
        theirs = run.transport.share(held if run.rank == owner else None)[owner]
        if run.rank == 0:
            state.update({run.names.index(name): entries for name, entries in theirs.items()})
    whole = whole_rows(run)
    with run.newest():
        if run.rank > 0:
            return None
        model = {
            key: whole[value.reader.name, ""] if isinstance(value, TableHandle) else _copied(value)
            for key, value in run.model.state_dict().items()
        }
    for (name, entry), rows in whole.items():
        if entry:
            state.setdefault(run.names.index(name), {})[entry] = rows
    groups, first = [], 0
    for group, count in zip(run.optimizer.param_groups, run.groups, strict=True):
        options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": list(range(first, first + count))})
        first += count
    return {"model": model, "optimizer": {"state": dict(sorted(state.items())), "param_groups": groups}}


def whole_rows(run: CyclicRun) -> dict[tuple[str, str], Tensor]:
    """Collective, when everything is settled: on rank 0 tables (entry "") and their optimizer state by row, whole."""
    tables = run.tables
    found = row_tensors(tables.by_name, tables.held, run.optimizer, run.transport)
    return {(tensor.table.name, tensor.entry): gathered(tensor, run.transport) for tensor in found}


def save_cyclic(run: CyclicRun, folder: Path, step: int, loops: Sequence[Mapping[str, Any]], keep: int) -> Path:
    """Collective, between two steps; drains the run and writes `folder/step-00001234/`, whole or not at all.

    Args:
        step: how many steps were taken, in all runs.
        loops: for every micro-batch, what its loop wants back: plain values and tensors.
        keep: how many of the newest checkpoints stay.
    """
    whole = export_cyclic(run)

    def write() -> Path:
        assert whole is not None
        path = new_folder(folder, step)
        content = {
            "model": whole["model"],
            "optimizer": by_name(whole["optimizer"], run.names),
            "optimizer_class": type(run.optimizer).__name__,
            "loops": [dict(loop) for loop in loops],
        }
        with (path / REST).open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path)
        record = FileRecord(REST, (path / REST).stat().st_size, digest(path / REST))
        mark(path, Marker(step, next_serial(folder), 1, (record,), {}, {}))
        prune(folder, keep)
        return path

    return by_rank_zero(run.transport, write)


def load_plain(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, tuple[dict[str, Any], ...]]:
    """Puts a checkpoint of any plan, or a file of plain PyTorch, into a model and an optimizer that nothing drives yet.

    Returns:
        how many steps had been taken, and what the loops had saved.

    Raises:
        ValueError: it does not fit the model or the optimizer; FileNotFoundError: nothing there.
    """
    saved = open_saved(path, 0, 1)
    kind = type(optimizer).__name__
    if saved.optimizer_class not in ("", kind):
        raise ValueError(
            f"load: {path} was saved from {saved.optimizer_class}, this run has {kind}; use the same class"
        )
    try:
        model.load_state_dict({key: _whole(value) for key, value in saved.model.items()})
    except RuntimeError as error:
        raise ValueError(f"load: {path} was saved from another model: {error}") from error
    if saved.optimizer is not None:
        names = parameter_names(model, optimizer, {})
        named = by_name(saved.optimizer, names) if saved.is_numbered else saved.optimizer
        state = {
            name: {entry: _whole(value) for entry, value in entries.items()} for name, entries in named["state"].items()
        }
        optimizer.load_state_dict(by_index({**named, "state": state}, names, optimizer))
    return saved.step, saved.loops


def _states(run: CyclicRun) -> dict[str, dict[str, Any]]:
    """The optimizer state that this process holds, by name. A home's optimizer keeps the stages at home there only."""
    stage_of = {name: stage.index for stage in run.stages for name in stage.names.values()}
    held: dict[str, dict[str, Any]] = {}
    first = 0
    for group, count in zip(run.optimizer.param_groups, run.groups, strict=True):
        names = run.names[first : first + count]
        if run.options.mode in (*RINGS, "shared"):
            names = [name for name in names if name in stage_of and run.owners[stage_of[name]] == run.rank]
        for name, parameter in zip(names, group["params"], strict=True):
            entries = run.optimizer.state.get(parameter, {})
            if name in run.tables.by_name:  # its rows are gathered
                table = run.tables.by_name[name]
                entries = table_state(table, run.optimizer, run.tables.held[name]).rest
            if entries:
                held[name] = {entry: _copied(value) for entry, value in entries.items()}
        first += count
    return held


def _whole(value: Any) -> Any:
    if isinstance(value, StoredRows):
        return read_rows(value, 0, value.shape[0]).clone()
    return value.clone() if isinstance(value, Tensor) else value  # it may be mapped from the file


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
