"""What was saved, whoever saved it: a checkpoint folder of ours, or a file of plain PyTorch.

Tensors are whole (`Tensor`, from a file mapped into memory) or cut by row over files (`StoredRows`); both are read by
row blocks, so nothing here needs memory for a whole table.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.checkpoint.folder import read_marker, stored_rows, verify
from armillary.checkpoint.row_file import StoredRows
from armillary.tables.optimizers import numbered_through

__all__ = ["REST", "SavedAverage", "SavedState", "open_saved", "read_rows"]

REST = "rest.pt"  # everything that is not cut by row

Stored = Tensor | StoredRows

OF_AN_OPTIMIZER = {"state", "param_groups"}  # has every state_dict of one


class SavedAverage(NamedTuple):
    """updates: made so far. values: by parameter."""

    updates: int
    values: dict[str, Stored]


@dataclass(frozen=True)
class SavedState:
    """Args of note:
    name: where it is and of which step, for messages.
    model: state_dict keys -> tensors (or other things that modules keep).
    optimizer: None if absent; "state" and "param_groups" by parameter name, or by number where `is_numbered`.
    loops: what each worker's loop gave to `save`, in rank order; of a plain file one, of what stands beside the model.
    digest: the same on ranks that opened the same thing.
    workers: how many saved it; 0 of a plain file.
    exchange, replicas: by parameter and entry, (workers, *shape): states of exchanges; weights and optimizer state
        where they differed between ranks. present: of every rank, the keys of those that it had.
    plan: under which it was saved, as JSON has it; profile: it was made from, as JSON; empty if nobody knows.
    averages: moving ones, by their keys.
    """

    name: str
    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    optimizer_class: str
    is_numbered: bool
    loops: tuple[dict[str, Any], ...]
    digest: str
    workers: int = 0
    exchange: Mapping[str, Mapping[str, StoredRows]] = field(default_factory=dict)
    replicas: Mapping[str, Mapping[str, StoredRows]] = field(default_factory=dict)
    present: tuple[list[str], ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    averages: Mapping[str, SavedAverage] = field(default_factory=dict)
    profile: str = ""


def read_rows(stored: Stored, first: int, last: int) -> Tensor:
    """Rows [first, last)."""
    return stored.read(first, last) if isinstance(stored, StoredRows) else stored[first:last]


def open_saved(path: Path, rank: int, workers: int) -> SavedState:
    """Opens a checkpoint folder or a plain file. Of a folder's checksums, rank r checks every workers-th file from r.

    Raises:
        ValueError: not a whole checkpoint, damaged, or holding something else; the message says what to do.
        FileNotFoundError: nothing there.
    """
    if not path.exists():
        raise FileNotFoundError(f"checkpoint: {path} does not exist")
    return _open_folder(path, rank, workers) if path.is_dir() else _open_plain(path)


def _open_folder(folder: Path, rank: int, workers: int) -> SavedState:
    marker = read_marker(folder)
    verify(folder, marker.files[rank::workers])
    rest = _load(folder / REST)
    model, state = dict(rest["model"]), rest["optimizer"]["state"]
    averages = {key: SavedAverage(one["updates"], one["whole"]) for key, one in rest.get("averages", {}).items()}
    by_rank: dict[str, dict[str, dict[str, StoredRows]]] = {"exchange": {}, "replicas": {}}
    for path, rows in stored_rows(folder, marker).items():
        kind, _, owned = path.partition("/")
        name, _, entry = owned.rpartition("/")  # a name may have "/" in it
        match kind:
            case "model":
                model[owned] = rows
            case "optimizer":
                state.setdefault(name, {})[entry] = rows
            case "average":
                averages[entry].values[name] = rows
            case "exchange" | "replicas":
                by_rank[kind].setdefault(name, {})[entry] = rows
            case _:
                raise ValueError(f"checkpoint: {folder} holds rows of {path!r}; this version knows no such thing")
    model.update({alias: model[name] for alias, name in marker.aliases.items()})
    return SavedState(
        f"{folder} (step {marker.step})",
        marker.step, model, rest["optimizer"], rest["optimizer_class"], False, tuple(rest["loops"]),
        f"step {marker.step}, save {marker.serial}, {[record.sha256[:12] for record in marker.files]}",
        marker.workers, by_rank["exchange"], by_rank["replicas"], tuple(rest.get("present", ())),
        marker.plan, averages, rest.get("profile", ""),
    )  # fmt: skip


def _open_plain(path: Path) -> SavedState:
    """A model's state_dict, or {"model": ..., "optimizer": ...}, by `torch.save`. What else stands beside a model is
    the loop's: a scheduler's state, an epoch."""
    found = _load(path)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"checkpoint: {path} holds {type(found).__name__}; want a state_dict, or a dict of 'model' and 'optimizer'"
        )
    model = found["model"] if isinstance(found.get("model"), Mapping) else found
    optimizer = found.get("optimizer") if model is not found else None
    loop = {} if model is found else {key: value for key, value in found.items() if key not in ("model", "optimizer")}
    states = [key for key, value in loop.items() if isinstance(value, Mapping) and value.keys() >= OF_AN_OPTIMIZER]
    if optimizer is None and states:
        raise ValueError(
            f"checkpoint: {path} has an optimizer's state under {states[0]!r}, where nobody looks; want it under "
            "'optimizer': load the file by torch, rename the key, and save it"
        )
    if isinstance(optimizer, list):  # of several
        optimizer = numbered_through(optimizer)
    digest = f"{path.stat().st_size} bytes, {len(model)} entries"
    return SavedState(str(path), 0, model, optimizer, "", True, (loop,), digest)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint: {path} is not tensors and plain values only, so loading it could run code; save state_dicts. "
            f"({str(error).splitlines()[0]})"
        ) from error
    except RuntimeError:  # older files cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)
