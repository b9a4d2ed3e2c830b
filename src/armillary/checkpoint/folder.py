"""A checkpoint folder: which files belong to it, and whether it is whole.

A save that dies half-way must never pass for a checkpoint, nor harm an older one: each save has a folder of its own,
and a marker with the size and checksum of every file is written last (renamed into place, synced to the disk). Only
folders with a marker count. The newest is the one saved last, whatever its step: after going back to an older
checkpoint, what the abandoned branch left behind does not win.

torch.distributed.checkpoint was weighed and left: it opens in plain PyTorch only after a conversion, has no checksums,
wants each worker's block whole in memory, and pickles its index. Rows are in safetensors, the rest in one file for
`torch.load(weights_only=True)`.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from armillary.checkpoint.row_file import FilePart, FileRecord, StoredRows, digest, sync_folder

__all__ = [
    "APART",
    "Marker",
    "RowIndex",
    "latest_checkpoint",
    "mark",
    "new_folder",
    "next_serial",
    "prune",
    "read_marker",
    "stored_rows",
    "verify",
]

MARKER = "complete.json"
FORMAT = 2
KNOWN = (1, 2)  # 1: without a plan
APART = "-apart"  # ends the name of a save of ranks that had come apart: it is no checkpoint to go on from
_FOLDER = re.compile(r"step-(\d{8,})(\.\d+)?")


class RowIndex(NamedTuple):
    """A tensor that is cut by row: its shape, its dtype as in "float32", (file, first row, last row) of each part."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Marker:
    """What a whole checkpoint holds. serial: counts the saves into the parent folder. aliases: tied names of tables.
    plan: under which it was saved, with its mesh, as JSON has it; empty in format 1. departures: of that plan."""

    step: int
    serial: int
    workers: int
    files: tuple[FileRecord, ...]
    rows: Mapping[str, RowIndex]
    aliases: Mapping[str, str]
    format: int = FORMAT
    plan: Mapping[str, Any] = field(default_factory=dict)
    departures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in KNOWN:
            raise ValueError(
                f"checkpoint: format {self.format} is none of {', '.join(map(str, KNOWN))}; read it with the version "
                "that wrote it"
            )
        names = {record.name for record in self.files}
        unlisted = {part[0] for index in self.rows.values() for part in index.parts} - names
        if unlisted:
            raise ValueError(f"checkpoint: rows are said to be in {sorted(unlisted)}, which are not among its files")

    @classmethod
    def from_json(cls, text: str) -> "Marker":
        fields = json.loads(text)
        rows = {
            key: RowIndex(tuple(shape), dtype, tuple((name, first, last) for name, first, last in parts))
            for key, (shape, dtype, parts) in fields["rows"].items()
        }
        files = tuple(FileRecord(**record) for record in fields["files"])
        departures = tuple(fields.get("departures", ()))
        return cls(**{**fields, "files": files, "rows": rows, "departures": departures})


def new_folder(parent: Path, step: int, ends: str = "") -> Path:
    """Makes an empty folder for a save: `step-00001234`, or `step-00001234.2` where that is taken, and `ends`."""
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        folder = parent / f"step-{step:08d}{'' if attempt == 1 else f'.{attempt}'}{ends}"
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
            continue
        sync_folder(parent)
        return folder


def mark(folder: Path, marker: Marker) -> None:
    """Declares the folder whole. Every file must be there in its full size: a worker may have written elsewhere.

    Raises:
        OSError: a file is missing or short, or the marker cannot be written.
    """
    fault = _why_unfit(folder, marker)
    if fault:
        raise OSError(f"{fault}; every worker must see {folder.parent} as the same folder (a shared file system)")
    draft = folder / (MARKER + ".draft")
    with draft.open("w") as file:
        file.write(json.dumps(asdict(marker), indent=1))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    draft.replace(folder / MARKER)
    sync_folder(folder)


def read_marker(folder: Path) -> Marker:
    """
    Raises:
        ValueError: the folder is no checkpoint, or not a whole one; the message says what is wrong and what to load.
    """
    if not (folder / MARKER).is_file():
        among = latest_checkpoint(folder)
        remedy = f"the newest whole one in it is {among}" if among else "a save there did not finish"
        raise ValueError(f"checkpoint: {folder} has no {MARKER}: it is not a whole checkpoint; {remedy}")
    try:
        marker = Marker.from_json((folder / MARKER).read_text())
        fault = _why_unfit(folder, marker)
    except (ValueError, KeyError, TypeError) as error:
        fault = f"{folder / MARKER} is no marker ({type(error).__name__}: {error})"
    if fault:
        raise ValueError(
            f"checkpoint: {fault}; load an older one, armillary.latest_checkpoint({str(folder.parent)!r}) finds it"
        )
    return marker


def _why_unfit(folder: Path, marker: Marker) -> str:
    """What is wrong with the sizes of a folder's files; empty if nothing."""
    for record in marker.files:
        path = folder / record.name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != record.nbytes:
            return f"{path} has {path.stat().st_size} bytes, the marker says {record.nbytes}"
    return ""


def verify(folder: Path, files: Sequence[FileRecord]) -> None:
    """
    Raises:
        ValueError: the bytes of a file are not those that were written.
    """
    for record in files:
        if digest(folder / record.name) != record.sha256:
            raise ValueError(
                f"checkpoint: the checksum of {folder / record.name} is not the one written: the file is damaged; "
                "load an older one"
            )


def stored_rows(folder: Path, marker: Marker) -> dict[str, StoredRows]:
    """The tensors that are cut by row, by key."""
    return {
        key: StoredRows(
            key,
            index.shape,
            getattr(torch, index.dtype),
            [FilePart(folder / name, first, last) for name, first, last in index.parts],
        )
        for key, index in marker.rows.items()
    }


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, None if there is none. Warns of those it skips: unfinished, or with
    files missing or short (their bytes are checked when they are loaded)."""
    whole, broken = _survey(Path(folder))
    if broken:
        listing = "; ".join(f"{path.name}: {fault}" for path, fault in broken.items())
        warnings.warn(f"checkpoint: skipped in {folder}: {listing}", stacklevel=2)
    return whole[-1][1] if whole else None


def next_serial(parent: Path) -> int:
    """One more than the last save into the folder."""
    whole, _ = _survey(parent)
    return whole[-1][0] + 1 if whole else 1


def prune(parent: Path, keep: int) -> None:
    """Removes whole checkpoints older than the newest `keep`, and remains of saves that did not finish. Damaged ones
    stay: someone may want to look."""
    whole, broken = _survey(parent)
    for folder in [path for _, path in whole[:-keep]] + [path for path in broken if not (path / MARKER).is_file()]:
        (folder / MARKER).unlink(missing_ok=True)  # first: a removal cut short must not leave a whole one
        sync_folder(folder)
        shutil.rmtree(folder)


def _survey(parent: Path) -> tuple[list[tuple[int, Path]], dict[Path, str]]:
    """(serial, folder) of whole checkpoints, oldest first; and what is wrong with the others."""
    whole, broken = [], {}
    for folder in sorted(parent.glob("step-*")) if parent.is_dir() else []:
        if not folder.is_dir() or not _FOLDER.fullmatch(folder.name):
            continue
        if not (folder / MARKER).is_file():
            broken[folder] = "unfinished"
            continue
        try:
            marker = Marker.from_json((folder / MARKER).read_text())
        except (ValueError, TypeError, KeyError) as error:
            broken[folder] = str(error)
            continue
        fault = _why_unfit(folder, marker)
        if fault:
            broken[folder] = fault
        else:
            whole.append((marker.serial, folder))
    return sorted(whole), broken
