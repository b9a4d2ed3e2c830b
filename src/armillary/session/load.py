"""Puts what was saved into a run, whatever plan and number of workers it was saved under.

Everything is opened, checked against model and optimizer, and agreed on by all ranks before the first value is
overwritten. A checkpoint that does not fit leaves the run as it was. What a driver does around that, it says itself
(`Job.reloading`): a schedule, for one, makes model and optimizer plain first, and begins anew behind it.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.checkpoint.row_file import StoredRows
from armillary.checkpoint.saved_state import SavedState, open_saved, read_rows
from armillary.plans.profile import Profile
from armillary.session.job import Job
from armillary.session.rank_state import fill_ranks
from armillary.tables.handle import TableHandle
from armillary.tables.optimizer_state import by_index, by_name, is_row_shaped
from armillary.tables.optimizers import kind_of
from armillary.tables.reshard import block_rows, equal_spans, from_spans
from armillary.tables.table import RowTable
from armillary.transport.agreement import FirstError
from armillary.transport.transport import Transport

__all__ = ["HALF", "load"]

HALF = "the run is now half loaded: load again"


def load(run: Job, path: str | Path | None) -> dict[str, Any]:
    """See `Run.load`."""
    with run.as_it_was():
        return _loaded(run, path)


def _loaded(run: Job, path: str | Path | None) -> dict[str, Any]:
    transport, trouble = run.transport, FirstError("load")
    if _is_nothing(path, transport):
        return {}
    assert path is not None
    named: dict[str, Any] | None = None
    saved: SavedState | None = None
    with trouble.kept():
        saved = open_saved(Path(path), run.rank, run.workers)
        trouble.about = saved.name
        mine = run.model.state_dict()
        shapes = {key: tuple(one.shape) for key, one in mine.items() if isinstance(one, Tensor)} | dict(run.shapes)
        _refuse_other_model(run, saved.model, shapes)
        named = _optimizer_by_name(run, saved, shapes)
    trouble.agree(transport)
    assert saved is not None
    _refuse_different(saved, transport)
    with run.reloading(saved.plan, saved.name):
        with torch.no_grad():
            _fill_model(run, saved.model, trouble)
            if named is not None:
                _fill_optimizer(run, named, trouble)
            _fill_averages(run, saved, trouble)
        trouble.agree(transport, HALF)
        transport.step = saved.step
        if run.job.profile is None and saved.profile:
            run.job = replace(run.job, profile=Profile.from_json(saved.profile))
    with torch.no_grad():
        fill_ranks(run, saved, trouble)
    trouble.agree(transport, HALF)
    if not saved.loops:
        return {}
    return saved.loops[run.rank if run.rank < len(saved.loops) else 0]


def _is_nothing(path: str | Path | None, transport: Transport) -> bool:
    """Collective: whether there is nothing to load, on all ranks.

    Raises:
        ValueError: there is on some ranks only. On every rank.
    """
    everyones = transport.share(path is None)
    if len(set(everyones)) > 1:
        none = ", ".join(str(rank) for rank, is_none in enumerate(everyones) if is_none)
        raise ValueError(
            f"load: path is None on rank {none} and a checkpoint on the others, so ranks would go on from different "
            "weights; every rank must see the same folder (latest_checkpoint gives None where it finds nothing), or "
            "be given the path that rank 0 found"
        )
    return path is None


def _refuse_other_model(run: Job, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    mine = run.model.state_dict()
    missing, extra = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if missing or extra:
        raise ValueError(
            f"it was saved from another model: it misses {missing or 'nothing'} and has {extra or 'nothing'} besides"
        )
    for key, shape in shapes.items():
        if key in saved and tuple(saved[key].shape) != shape:
            raise ValueError(f"{key!r} was saved with shape {tuple(saved[key].shape)}, the model has {shape}")


def _optimizer_by_name(run: Job, saved: SavedState, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """The saved optimizer by parameter name, checked against the run's; None if there is none to load."""
    if saved.optimizer is None:
        return None
    name = kind_of(run.optimizer)
    if saved.optimizer_class not in ("", name):
        raise ValueError(
            f"it was saved from {saved.optimizer_class}, this run has {name}; use the same optimizer class"
        )
    names = run.names
    named = by_name(saved.optimizer, names) if saved.is_numbered else dict(saved.optimizer)
    by_index(named, names, run.optimizer)
    for owner, entries in named["state"].items():
        for entry, value in entries.items():
            if isinstance(value, StoredRows) and tuple(value.shape) != shapes[owner]:
                raise ValueError(f"{entry!r} of {owner!r} was saved with shape {value.shape}, want {shapes[owner]}")
    return named


def _fill_model(run: Job, saved: Mapping[str, Any], trouble: FirstError) -> None:
    mine = run.model.state_dict()
    whole = {}
    filled: set[str] = set()  # a tied table has several keys
    for key, value in mine.items():
        stored = saved[key]
        if isinstance(value, TableHandle):
            table = run.tables[value.reader.name]
            if table.name not in filled:
                filled.add(table.name)
                _fill_shard(run, table.shard, table, stored, trouble)
        elif isinstance(stored, StoredRows):
            with trouble.kept():
                _fill_whole(value, stored)
        else:
            whole[key] = stored
    with trouble.kept():
        run.model.load_state_dict(whole, strict=False)


def _fill_optimizer(run: Job, named: Mapping[str, Any], trouble: FirstError) -> None:
    """Tables get the rows this rank holds: in the optimizer's own state, or beside it where it sees a window."""
    names, state = run.names, dict[str, dict[str, Any]]()
    for held in run.held.values():
        held.clear()
    for name in names:
        if name not in named["state"]:
            continue
        entries = dict(named["state"][name])
        table = run.tables.get(name)
        for entry in sorted(entries):
            value = entries[entry]
            if table is not None and is_row_shaped(value, table):
                entries[entry] = _table_entry(run, table, entry, value, trouble)
            elif isinstance(value, StoredRows):
                entries[entry] = torch.empty(value.shape, dtype=value.dtype)
                with trouble.kept():
                    _fill_whole(entries[entry], value)
            elif isinstance(value, Tensor):
                entries[entry] = value.clone()  # it may be mapped from the file
        state[name] = entries
    with trouble.kept():
        run.optimizer.load_state_dict(by_index({**named, "state": state}, names, run.optimizer))


def _table_entry(run: Job, table: RowTable, entry: str, stored: Tensor | StoredRows, trouble: FirstError) -> Tensor:
    dtype = table.shard.dtype if stored.dtype.is_floating_point else stored.dtype  # as torch.optim casts
    rows = torch.zeros(table.shard.shape, dtype=dtype, device=table.shard.device)
    _fill_shard(run, rows, table, stored, trouble)
    if not table.has_window:
        return rows
    run.held[table.name][entry] = rows
    return rows[:0].clone()


def _fill_averages(run: Job, saved: SavedState, trouble: FirstError) -> None:
    """Moving averages that were not saved begin anew, from the model as it was loaded."""
    for key, average in run.averages.items():
        average.begin(run.model, run.tables)
        if key not in saved.averages:
            continue
        average.updates, values = saved.averages[key]
        for name, table in run.tables.items():
            _fill_shard(run, table.averages[key], table, values[name], trouble)
        with trouble.kept():
            for name, into in average.whole.items():
                stored = values[name]
                if isinstance(stored, StoredRows):
                    _fill_whole(into, stored)
                else:
                    into.copy_(stored)
    if run.rank == 0 and (left := sorted(saved.averages.keys() - run.averages.keys())):
        warnings.warn(
            f"load: the checkpoint holds moving averages of decay {', '.join(left)}, which this run does not keep; "
            "call run.ema(decay) before run.load to go on with them",
            stacklevel=2,
        )


def _fill_whole(into: Tensor, stored: StoredRows) -> None:
    step = block_rows(into)
    for first in range(0, into.shape[0], step):
        last = min(first + step, into.shape[0])
        into[first:last].copy_(stored.read(first, last))


def _fill_shard(run: Job, into: Tensor, table: RowTable, stored: Tensor | StoredRows, trouble: FirstError) -> None:
    """The rows this rank holds of a table or of its optimizer state. Of files cut by row, each rank reads its block."""
    if table.is_pulled and isinstance(stored, StoredRows):
        spans = equal_spans(table.shape[0], run.workers)

        def read(first: int, last: int) -> Tensor:
            rows = torch.zeros((last - first, *into.shape[1:]), dtype=into.dtype)
            with trouble.kept():  # the other ranks wait for this rank's rows, whatever they are
                rows.copy_(stored.read(first, last))
            return rows

        from_spans(read, into, table, spans, run.transport)
        return
    with trouble.kept():
        step = block_rows(into)
        for first in range(0, into.shape[0], step):
            last = min(first + step, into.shape[0])
            if table.is_pulled:
                rows = stored[table.ownership.ids(run.rank, torch.arange(first, last))]  # type: ignore[index]
            else:
                rows = read_rows(stored, first, last)
            into[first:last].copy_(rows)


def _refuse_different(saved: SavedState, transport: Transport) -> None:
    """
    Raises:
        ValueError: ranks opened different things. On every rank.
    """
    digests = transport.share(saved.digest)
    if len(set(digests)) > 1:
        names = transport.share(saved.name)
        listing = "; ".join(f"rank {rank}: {names[rank]}, {digest}" for rank, digest in enumerate(digests))
        raise ValueError(f"load: ranks opened different things ({listing}); give all of them the same path")
