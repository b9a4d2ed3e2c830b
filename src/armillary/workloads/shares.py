"""Which examples each worker draws at each step, and arrays that workers which start together compute only once.

One order of the examples is cut into global batches of `batch_size * workers`, and a worker takes its slice of each. So
the union over the workers of step t depends on the global batch alone: four workers of 8 see what one worker of 32
sees. That lets one process replay many.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arrays",
    "Ids",
    "alike",
    "draw",
    "fingerprint",
    "held_out_share",
    "joined",
    "kept",
    "parted",
    "shuffled",
    "train_share",
]

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


Ids = NDArray[np.int64]


def draw(split: str, examples: int, batch_size: int, place: tuple[int, int], seed: int) -> Iterator[Ids]:
    """One epoch of a worker's indices; `place` is (worker, workers). Train is shuffled, held-out is not."""
    if split == "train":
        return train_share(shuffled(examples, seed), batch_size, place)
    if split == "held_out":
        return held_out_share(examples, batch_size, place)
    raise ValueError(f"no split {split!r}; there are 'train' and 'held_out'")


def shuffled(examples: int, seed: int) -> Ids:
    """The order of one training epoch, the same for every worker."""
    return np.random.default_rng(seed).permutation(examples)


def alike(lengths: Ids, together: int, seed: int) -> Ids:
    """The order of one training epoch in which global batches of `together` examples have similar lengths.

    Padding then costs little. Which examples meet, and when, is still random among those of equal length.
    """
    order = shuffled(len(lengths), seed)
    order = order[: len(order) // together * together]  # drop at random, not the longest
    batches = order[np.argsort(lengths[order], kind="stable")].reshape(-1, together)
    return np.random.default_rng((seed, 1)).permutation(batches).ravel()


def train_share(order: Ids, batch_size: int, place: tuple[int, int]) -> Iterator[Ids]:
    """The worker's slice of each full global batch of `order`; the remainder is dropped.

    Every worker gets equally many batches of exactly `batch_size`.
    """
    worker, workers = _checked(place)
    together = batch_size * workers
    if len(order) < together:
        raise ValueError(
            f"{len(order)} training examples do not fill one global batch of "
            f"{workers} workers x {batch_size}; take a smaller batch_size or more data"
        )
    for start in range(0, len(order) - together + 1, together):
        yield order[start + worker * batch_size : start + (worker + 1) * batch_size]


def held_out_share(examples: int, batch_size: int, place: tuple[int, int]) -> Iterator[Ids]:
    """The worker's slices of `range(examples)`, every example exactly once over all workers.

    Global batches, then workers, differ by at most one example in size, so that all workers get equally many
    batches and none is larger than `batch_size`. Only with fewer examples than workers do some get none.
    """
    worker, workers = _checked(place)
    steps = -(-examples // (batch_size * workers))
    for together in np.array_split(np.arange(examples), max(1, steps)):
        mine = np.array_split(together, workers)[worker]
        if len(mine):
            yield mine


def _checked(place: tuple[int, int]) -> tuple[int, int]:
    worker, workers = place
    if not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers}: workers are numbered from 0 to workers - 1")
    return place
