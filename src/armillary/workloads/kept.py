"""Arrays computed once and kept in a file, so that workers which start together compute them only once."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrays", "fingerprint", "joined", "kept", "parted"]

Arrays = dict[str, NDArray[Any]]


def kept(path: Path, compute: Callable[[], Arrays]) -> Arrays:
    """The arrays in the file `path`; if it is not there, what `compute` returns, which is written first.

    Safe for any number of processes: the first to come computes, the others wait, and a reader sees the
    whole file or none. The lock is released when its holder dies, and its file goes with it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            arrays, draft = compute(), path.with_suffix(f".{os.getpid()}.npz")
            np.savez(draft, allow_pickle=False, **arrays)
            os.replace(draft, path)
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process is. Who waited for a lock of which the file is gone takes a new one."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(path, lock.fileno()):
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def fingerprint(files: Iterable[Path], *settings: object) -> str:
    """A name for what is computed from `files` with `settings`; it changes if a file's size or date does."""
    listing = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join([repr(settings), *listing]).encode()).hexdigest()[:16]


def joined(words: Iterable[str]) -> NDArray[np.uint8]:
    """Words without spaces as one array of bytes."""
    return np.frombuffer(" ".join(words).encode(), dtype=np.uint8)


def parted(text: NDArray[np.uint8]) -> tuple[str, ...]:
    """What `joined` joined."""
    return tuple(text.tobytes().decode().split(" "))
