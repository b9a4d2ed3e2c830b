"""What each rank keeps for itself, in a checkpoint: states of exchanges; weights, buffers, optimizer state that differ.

Everything goes by parameter, never by bucket, so that a plan with other buckets opens it: a tensor (ranks, *shape) cut
by rank, each rank writing its own. Where the same ranks hold a parameter every rank gets its own again, and training
goes on bit for bit. On others (other workers, or stages on fewer ranks) the model is the mean that the rest of the
checkpoint holds, and states are dealt out anew as their exchange says, from those that held it to those that do.
"""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.checkpoint.folder import RowIndex
from armillary.checkpoint.row_file import FileLayout, FileRecord, RowFile, StoredRows
from armillary.checkpoint.saved_state import SavedState
from armillary.exchanges.dense import Resharding
from armillary.exchanges.error_feedback import RESIDUAL
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.replica_checks import differing, differing_buffers, write_buffer
from armillary.runtime.weight_averaging import kept_by_optimizer
from armillary.session.job import Job
from armillary.transport.agreement import FirstError
from armillary.transport.groups import data_place, data_ranks

__all__ = ["OwnTensors", "fill_ranks", "index_of_ranks", "own_tensors", "write_ranks"]

WEIGHTS, BUFFER = "weights", "buffer"


class OwnTensors(NamedTuple):
    """tensors: this rank's, by their names in a checkpoint, the same names on every rank; zeros where it has none.
    present: of every rank, the names of those that it has."""

    tensors: dict[str, Tensor]
    present: tuple[list[str], ...]


def own_tensors(run: Job) -> OwnTensors:
    """Collective. Widest dtype first, which keeps files aligned."""
    own = dict(_own(run))
    everyones = run.transport.share({key: (tuple(value.shape), value.dtype) for key, value in own.items()})
    known = {key: like for theirs in everyones for key, like in theirs.items()}
    ordered = sorted(known.items(), key=lambda one: (-one[1][1].itemsize, one[0]))
    tensors = {key: own.get(key, torch.zeros(shape, dtype=dtype)) for key, (shape, dtype) in ordered}
    return OwnTensors(tensors, tuple(sorted(theirs) for theirs in everyones))


def _own(run: Job) -> Iterator[tuple[str, Tensor]]:
    for unit in _dense(run):
        for number, name in enumerate(unit.bucket.layout.names):
            for entry, value in unit.state.items():
                mine = _of_parameter(unit, number, entry, value)
                if mine.numel():
                    yield f"exchange/{name}/{entry}", mine
    for name, parameter in differing(run.units).items():
        yield f"replicas/{name}/{WEIGHTS}", parameter.detach()
        for entry, value in kept_by_optimizer(run.optimizer, parameter).items():
            yield f"replicas/{name}/optimizer {entry}", value.detach()
    for place in differing_buffers(run.units, run.model):
        if place.is_persistent:
            yield f"replicas/{place.name}/{BUFFER}", place.there.detach()


def _dense(run: Job) -> list[DenseUnit]:
    return [unit for unit in run.units if isinstance(unit, DenseUnit)]


def _of_parameter(unit: DenseUnit, number: int, entry: str, value: Tensor) -> Tensor:
    """What of an entry of a state belongs to one parameter: in the parameter's shape where it has a number for each of
    its values."""
    begin, end = unit.exchange.span(entry, unit.bucket.layout, number)
    if entry in unit.exchange.counts:
        return value[begin:end]
    like = unit.bucket.views[number]
    return value[begin:end].as_strided(like.shape, like.stride())


def write_ranks(run: Job, folder: Path, tensors: Mapping[str, Tensor], trouble: FirstError) -> list[FileRecord]:
    """This rank's part."""
    if not tensors:
        return []
    layouts = {key: FileLayout((1, *tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    records = []
    with trouble.kept(), ExitStack() as stack:
        file = stack.enter_context(RowFile(folder / _file_name(run.rank, run.workers), layouts))
        for tensor in tensors.values():
            file.append(tensor.cpu())
        records.append(file.finish())
    return records


def index_of_ranks(tensors: Mapping[str, Tensor], workers: int) -> dict[str, RowIndex]:
    """Where the tensors of all ranks are."""
    parts = tuple((_file_name(rank, workers), rank, rank + 1) for rank in range(workers))
    return {
        key: RowIndex((workers, *tensor.shape), str(tensor.dtype).removeprefix("torch."), parts)
        for key, tensor in tensors.items()
    }


def _file_name(rank: int, workers: int) -> str:
    return f"ranks-{rank:05d}-of-{workers:05d}.safetensors"


def fill_ranks(run: Job, saved: SavedState, trouble: FirstError) -> None:
    """Model and optimizer hold what the rest of the checkpoint says; now what each rank has for itself."""
    with trouble.kept():
        if saved.workers == run.workers and saved.present:  # folders of format 1 say nothing of ranks
            _fill_replicas(run, saved)
        left = {name: {*entries} for name, entries in saved.exchange.items()}
        for unit in _dense(run):
            unit.begin_anew(data_place(run.plan.mesh, run.transport.place))
            for number, name in enumerate(unit.bucket.layout.names):
                for entry, stored in saved.exchange.get(name, {}).items():
                    if entry not in unit.state:
                        continue
                    into = _of_parameter(unit, number, entry, unit.state[entry])
                    if math.prod(stored.shape[1:]) == into.numel():  # else its options say another length
                        held = _holders(saved, f"exchange/{name}/{entry}", stored)
                        _fill_entry(run, into, stored, held, unit.exchange.resharding.get(entry, "drop"))
                        left[name].discard(entry)
        _warn_of(left, run.rank)


def _warn_of(left: Mapping[str, Collection[str]], rank: int) -> None:
    """left: by parameter, the entries that found no place."""
    names = sorted(name for name, entries in left.items() if entries)
    if not names or rank:
        return
    entries = sorted({entry for name in names for entry in left[name]})
    is_lost = RESIDUAL in entries
    lost = "gradients that waited in it are lost (attach a plan that sends them as they were sent to keep them)"
    warnings.warn(
        f"load: the exchanges of this plan keep nothing of the {' and '.join(entries)} that was saved for "
        f"{', '.join(names)}; it is dropped, and {lost if is_lost else 'gradients that waited are kept'}",
        stacklevel=3,
    )


def _holders(saved: SavedState, key: str, stored: StoredRows) -> list[int]:
    """The ranks that had it when it was saved; all, where the folder does not say."""
    found = [rank for rank, keys in enumerate(saved.present) if key in keys]
    return found or list(range(stored.shape[0]))


def _fill_entry(run: Job, into: Tensor, stored: StoredRows, held: Sequence[int], how: Resharding) -> None:
    holding = data_ranks(run.plan.mesh, run.rank)
    if list(held) == holding and stored.shape[0] == run.workers:
        into.copy_(stored.read(run.rank, run.rank + 1)[0])
    elif how == "same":
        into.copy_(stored.read(held[0], held[0] + 1)[0])
    elif how != "drop":
        total = stored.read(held[0], held[0] + 1)[0]
        for rank in held[1:]:
            total += stored.read(rank, rank + 1)[0]
        into.copy_(total / (len(holding) if how == "sum" else len(held)))


def _fill_replicas(run: Job, saved: SavedState) -> None:
    there = saved.present[run.rank]
    for place in differing_buffers(run.units, run.model):
        if stored := saved.replicas.get(place.name, {}).get(BUFFER):
            write_buffer(place, stored.read(run.rank, run.rank + 1)[0].to(place.there))
    for name, parameter in differing(run.units).items():
        kept = kept_by_optimizer(run.optimizer, parameter)
        for entry, stored in saved.replicas.get(name, {}).items():
            into = parameter if entry == WEIGHTS else kept.get(entry.removeprefix("optimizer "))
            if into is not None:
                into.copy_(stored.read(run.rank, run.rank + 1)[0])
        if name in saved.replicas and not any(key.startswith(f"replicas/{name}/optimizer ") for key in there):
            run.optimizer.state.pop(parameter, None)  # never stepped here
