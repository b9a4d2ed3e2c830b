"""Saves a run in a folder that opens under any plan, and exports it as plain state_dicts.

A checkpoint is one folder per step, written by all workers at once. Each writes its contiguous block of the rows of
every table and of its optimizer state, rank 0 all the rest. `state_dict()` never communicates. Everything here does, so
every rank must call it.

`CheckpointEvery` goes by rank 0's clock: clocks differ, and a rank that saved alone would wait for ever. `export`
collects rows in blocks, so only rank 0 needs memory for whole tables.
"""

import copy
import io
import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from armillary.checkpoint.folder import APART, Marker, RowIndex, latest_checkpoint, mark, new_folder, next_serial, prune
from armillary.checkpoint.row_file import FileLayout, FileRecord, RowFile, digest, sync_folder
from armillary.checkpoint.saved_state import REST
from armillary.session.health import is_apart, refuse_apart
from armillary.session.job import Job
from armillary.session.rank_state import index_of_ranks, own_tensors, write_ranks
from armillary.tables.build import RowTensor, average_tensors, gathered, row_tensors
from armillary.tables.handle import TableHandle
from armillary.tables.optimizers import kind_of, split
from armillary.tables.reshard import equal_spans, to_spans
from armillary.transport.agreement import FirstError

__all__ = ["CheckpointEvery", "export", "export_model", "latest_checkpoint", "save"]


class CheckpointedRun(Protocol):
    """Whose checkpoints they are."""

    @property
    def _engine(self) -> Job: ...


@dataclass(eq=False)
class CheckpointEvery:
    """Begins when it is made. steps, seconds: whichever comes first; 0 is never."""

    steps: int = 0
    seconds: float = 0.0
    last_seconds: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.steps < 0 or self.seconds < 0:
            raise ValueError(f"every: want no negative interval, got {self.steps} steps, {self.seconds} seconds")

    def is_due(self, step: int, now_seconds: float) -> bool:
        """Whether `step` ends an interval, or the last one to be due was too long ago. Asks nobody."""
        by_step = self.steps > 0 and step > 0 and step % self.steps == 0
        return by_step or 0 < self.seconds <= now_seconds - self.last_seconds

    def due(self, run: CheckpointedRun, step: int) -> bool:
        """Collective where seconds count (one number per call): the same answer on every rank, after `step` steps."""
        now = time.monotonic()
        is_due = self.is_due(step, now)
        if self.seconds > 0:
            job = run._engine
            with job.transport.within("CheckpointEvery.due"), job.transport.unrecorded():
                job.serve()
                is_due = bool(job.transport.agree_largest([float(is_due and job.rank == 0)])[0])
        if is_due:
            self.last_seconds = now
        return is_due


def export(run: Job) -> dict[str, Any] | None:
    """See `Run.export`. Of several optimizers "optimizer" is a list, in the order in which they were given."""
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


def save(run: Job, folder: str | Path, *, loop: Mapping[str, Any] | None = None, keep: int = 3) -> Path:
    """See `Run.save`. Where ranks have come apart, what rank 0 (and owners of rows) hold is in the folder that is never
    the newest, and no older one is removed."""
    folder, loop = Path(folder), {} if loop is None else loop
    if keep < 1:
        raise ValueError(f"save: want to keep at least 1 checkpoint, got {keep}")
    transport = run.transport
    trouble = FirstError("save")
    with trouble.kept():
        if not isinstance(loop, Mapping):
            raise ValueError(f"loop is a {type(loop).__name__}; want a mapping, as in loop={{'step': 3}}")
        _refuse_unloadable("loop", dict(loop))
        names = run.names
    trouble.agree(transport)
    averages = {key: {"updates": one.updates, "whole": one.whole_of(run.tables)} for key, one in run.averages.items()}
    updates = {key: one.updates for key, one in run.averages.items()}
    _refuse_disagreement(run, (transport.step, str(folder), keep, names, updates))
    run.settle()
    apart = is_apart(run, "run.save").error
    tensors = [*row_tensors(run.tables, run.held, run.optimizer, run.transport), *average_tensors(run.tables)]
    tensors.sort(key=lambda tensor: -tensor.shard.dtype.itemsize)  # which keeps files aligned
    own = own_tensors(run)
    loops = transport.share(dict(loop))
    path = folder
    records: list[FileRecord] = []
    with run.rest() as rest:
        with trouble.kept():
            if run.rank == 0:
                _refuse_unloadable("model", rest["model"])
                _refuse_unloadable("optimizer", rest["optimizer"])
                path = new_folder(folder, transport.step, APART if apart else "")
        trouble.agree(transport)
        path = Path(transport.share(path)[0])
        with trouble.kept():
            if run.rank == 0:
                seen = "" if run.job.profile is None else run.job.profile.to_json()
                rest = {**rest, "loops": loops, "present": own.present, "averages": averages, "profile": seen}
                records.append(_write_rest(run, path / REST, rest))
    records += _write_rows(run, path, tensors, trouble)
    records += write_ranks(run, path, own.tensors, trouble)
    trouble.agree(transport, f"{path} is unfinished and will not be loaded; older checkpoints are as they were")
    files = tuple(record for theirs in transport.share(records) for record in theirs)
    with trouble.kept():
        if run.rank == 0:
            index = {**_index(run, tensors), **index_of_ranks(own.tensors, run.workers)}
            marker = Marker(
                transport.step, next_serial(folder), run.workers, files, index, _aliases(run),
                plan=json.loads(run.plan.to_json()), departures=tuple(run.plan.departures),
            )  # fmt: skip
            mark(path, marker)
            if not apart:
                prune(folder, keep)
    trouble.agree(transport)
    if apart:
        raise RuntimeError(
            f"rank {run.rank}: {apart}. What was to be saved is in {path}, which is never taken for the newest; older "
            "checkpoints are as they were"
        )
    return path


def _refuse_unloadable(what: str, whole: dict[str, Any]) -> None:
    if _is_loadable(whole):
        return
    path, value = _unloadable_in(what, whole)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ValueError(
        f"{path} is a {kind}, which torch.load(weights_only=True) refuses; give plain values, tensors and state_dicts "
        "(torch.from_numpy, .item(), int, str)"
    )


def _is_loadable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:
        return False
    return True


def _without_tensors(value: Any) -> Any:
    """The same with nothing in the place of tensors, which may be large and are loaded for sure."""
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(one) for one in value]
    is_tensor = type(value) in (Tensor, nn.Parameter) and not vars(value)  # others bring what else they hold
    return None if is_tensor else value


def _unloadable_in(path: str, value: Any) -> tuple[str, Any]:
    """The innermost thing that torch does not load, and where it stands."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in inner:
        if not _is_loadable(one):
            return _unloadable_in(f"{path}[{key!r}]", one)
    return path, value


def _refuse_disagreement(run: Job, mine: tuple[Any, ...]) -> None:
    everyones = run.transport.share(mine)
    subjects = ("step", "folder", "keep", "optimizer parameters", "updates of moving averages")
    for what, theirs in zip(subjects, zip(*everyones, strict=True), strict=True):
        if any(other != theirs[0] for other in theirs):
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(theirs))
            raise ValueError(f"save: ranks disagree on the {what} ({listing}); call save alike on every rank")


def _file_name(rank: int, workers: int) -> str:
    return f"rows-{rank:05d}-of-{workers:05d}.safetensors"


def _write_rows(run: Job, folder: Path, tensors: list[RowTensor], trouble: FirstError) -> list[FileRecord]:
    """This rank's blocks of every row tensor. After an error it goes on taking part, without writing."""
    layouts = {}
    for tensor in tensors:
        first, last = equal_spans(tensor.table.shape[0], run.workers)[run.rank]
        layouts[tensor.key] = FileLayout((last - first, *tensor.table.shape[1:]), tensor.shard.dtype)
    if not tensors:
        return []
    records = []
    with trouble.kept(), ExitStack() as stack:  # closing writes too, and may fail
        with trouble.kept():
            file = stack.enter_context(RowFile(folder / _file_name(run.rank, run.workers), layouts))
        for tensor in tensors:
            spans = equal_spans(tensor.table.shape[0], run.workers)
            for _, block in to_spans(tensor.shard, tensor.table, spans, run.transport):
                with trouble.kept():
                    if trouble.error is None:
                        file.append(block)
        with trouble.kept():
            if trouble.error is None:
                records.append(file.finish())
    return records


def _write_rest(run: Job, path: Path, rest: Mapping[str, Any]) -> FileRecord:
    """Everything that is not cut by row or by rank. The optimizer goes by parameter name."""
    content = {**rest, "optimizer_class": kind_of(run.optimizer)}
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return FileRecord(path.name, path.stat().st_size, digest(path))


def _index(run: Job, tensors: list[RowTensor]) -> dict[str, RowIndex]:
    index = {}
    for tensor in tensors:
        spans = equal_spans(tensor.table.shape[0], run.workers)
        parts = tuple((_file_name(rank, run.workers), *span) for rank, span in enumerate(spans))
        dtype = str(tensor.shard.dtype).removeprefix("torch.")
        index[tensor.key] = RowIndex(tuple(tensor.table.shape), dtype, parts)
    return index


def _aliases(run: Job) -> dict[str, str]:
    """Other names under which the model's state_dict holds a table (tied weights)."""
    handles = {key: value for key, value in run.model.state_dict().items() if isinstance(value, TableHandle)}
    return {key: handle.reader.name for key, handle in handles.items() if key != handle.reader.name}
