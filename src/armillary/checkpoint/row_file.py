"""Rows in safetensors files: written a block at a time, read by slices.

The format is safetensors, so that plain `safetensors.safe_open` opens what a worker wrote. Its library reads; it can
write only tensors that are whole in memory, which a worker's block of a large table must not be, so writing is ours:
eight bytes of header length, a JSON header, the tensors' bytes (https://github.com/huggingface/safetensors, "Format").
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["FileLayout", "FilePart", "FileRecord", "RowFile", "StoredRows", "digest", "sync_folder"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class FileRecord:
    """A finished file as the marker remembers it."""

    name: str
    nbytes: int
    sha256: str


class FileLayout(NamedTuple):
    """Shape and dtype of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RowFile:
    """A safetensors file under way (a context): tensors are appended whole or by row blocks, in the order of `layouts`.

    Raises:
        ValueError: a dtype the format has no name for. OSError: the folder cannot be written.
    """

    def __init__(self, path: Path, layouts: Mapping[str, FileLayout]):
        unnamed = {key: layout.dtype for key, layout in layouts.items() if layout.dtype not in _NAMES}
        if unnamed:
            raise ValueError(f"checkpoint: rows of dtype {unnamed} cannot be written; there are {list(_NAMES)}")
        self.path = path
        self.hash = hashlib.sha256()
        self.nbytes = 0
        header = _header(layouts)
        self.expected_nbytes = len(header) + sum(_nbytes(layout) for layout in layouts.values())
        self.file = path.open("wb")
        try:
            self._write(header)
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, rows: Tensor) -> None:
        """The next rows (CPU, any number)."""
        if rows.numel():
            self._write(rows.detach().contiguous().view(-1).view(torch.uint8).numpy().data)

    def _write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        self.hash.update(content)
        self.nbytes += len(content)

    def finish(self) -> FileRecord:
        """The file is on the disk when this returns."""
        assert self.nbytes == self.expected_nbytes, f"{self.path.name}: {self.nbytes=}, {self.expected_nbytes=}"
        self.file.flush()
        os.fsync(self.file.fileno())
        return FileRecord(self.path.name, self.nbytes, self.hash.hexdigest())


def _nbytes(layout: FileLayout) -> int:
    return math.prod(layout.shape) * layout.dtype.itemsize


def _header(layouts: Mapping[str, FileLayout]) -> bytes:
    entries: dict[str, object] = {}
    begin = 0
    for key, layout in layouts.items():
        end = begin + _nbytes(layout)
        entries[key] = {"dtype": _NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return len(text).to_bytes(8, "little") + text


class FilePart(NamedTuple):
    """Rows [first, last) of a tensor and the file that holds them."""

    path: Path
    first: int
    last: int


@dataclass(frozen=True)
class StoredRows:
    """A tensor (rows, *row shape) cut by row over safetensors files, where it goes by the name `key`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[FilePart]

    def read(self, first: int, last: int) -> Tensor:
        """Rows [first, last): (last - first, *row shape)."""
        pieces = [torch.empty((0, *self.shape[1:]), dtype=self.dtype)]
        for part in self.parts:
            low, high = max(first, part.first), min(last, part.last)
            if low < high:
                with safe_open(part.path, framework="pt") as file:
                    pieces.append(file.get_slice(self.key)[low - part.first : high - part.first])
        return torch.cat(pieces)


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in a folder is on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
