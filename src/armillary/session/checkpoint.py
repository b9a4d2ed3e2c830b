"""Saves a run.

A checkpoint is one folder per step, written by all workers at once: each writes its contiguous block of the rows of
every table and of its optimizer state, rank 0 all the rest. It does not know the plan: it opens on any number of
workers and under any other plan. `state_dict()` never communicates; everything here does, so every rank must call it.
"""

import io
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.runtime.checkpointing.checkpoint import (
    APART,
    Marker,
    RowIndex,
    latest_checkpoint,
    mark,
    new_folder,
    next_serial,
    prune,
)
from armillary.runtime.checkpointing.row_blocks import equal_spans, to_spans
from armillary.runtime.checkpointing.row_file import FileLayout, FileRecord, RowFile, digest, sync_folder
from armillary.runtime.checkpointing.saved import REST
from armillary.runtime.first_error import FirstError
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.optimizers import kind_of
from armillary.session.apart import is_apart
from armillary.session.every import CheckpointEvery
from armillary.session.exchange_state import index_of_ranks, own_tensors, write_ranks
from armillary.session.job import Job
from armillary.session.row_tensors import RowTensor, average_tensors, row_tensors

__all__ = ["CheckpointEvery", "latest_checkpoint", "save"]


def save(run: Job, folder: str | Path, *, loop: Mapping[str, Any] | None = None, keep: int = 3) -> Path:
    """Collective, between two steps. Writes `folder/step-00001234/`; when it returns, the checkpoint is whole, on the
    disk, and the newest; an error at any moment leaves the older ones as they were.

    Args:
        folder: seen by every worker (a shared file system if they run on several machines).
        loop: what this rank's loop wants back on resume (scheduler and scaler state_dicts, random state, place in the
            data): plain values and tensors. Each rank gives its own.
        keep: how many of the newest checkpoints in `folder` stay.

    Raises:
        ValueError: ranks disagree on what to save, or something in it could not be loaded. RuntimeError: a rank could
            not write; the message names it. Or ranks no longer hold alike what the plan keeps alike: what rank 0 (and
            owners of rows) hold is then in a folder whose name says so, and no older one is removed.
    """
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
