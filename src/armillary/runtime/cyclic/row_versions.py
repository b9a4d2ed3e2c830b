"""The rows of a table that this rank owns, through time: the newest, and what each of the last steps changed of them.

An older version is no copy of the shard. Of every step that somebody may still read past, the rows it changed are kept
as they were before; to serve an older version, they change places with those in the shard, and back again later. What
that costs is the touched rows of a step, twice a step at most. Where the optimizer moves every row there is nothing to
save: then the whole shard is kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowVersions"]


@dataclass(eq=False)
class _Change:
    """What a step changed. rows: (k,) local rows, or None for all of them. values: of the version not standing."""

    rows: Tensor | None
    values: Tensor

    def swap(self, shard: Tensor) -> None:
        if self.rows is None:
            held = shard.clone()
            shard.copy_(self.values)
        else:
            held = shard.index_select(0, self.rows)
            shard.index_copy_(0, self.rows, self.values)
        self.values = held


class RowVersions:
    """Begins with version 0. shard: (local rows, *row shape); it holds the version that `stand_at` last asked for."""

    def __init__(self, name: str, shard: Tensor) -> None:
        self.newest = 0
        self._name, self._shard, self._standing = name, shard, 0
        self._changes: dict[int, _Change] = {}  # by the version before

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that can be read."""
        return (*sorted(self._changes), self.newest)

    @property
    def held_bytes(self) -> int:
        """Of rows as they were."""
        return sum(change.values.nbytes for change in self._changes.values())

    def stand_at(self, version: int) -> None:
        """Makes the shard hold that version.

        Raises:
            RuntimeError: it is not there (not yet, or no more); another one is never served instead.
        """
        if version not in self.versions:
            raise RuntimeError(
                f"{self._name}: version {version} of the rows is missing, there are {self.versions}; the schedule was "
                f"not kept to"
            )
        with torch.no_grad():
            while self._standing > version:
                self._standing -= 1
                self._changes[self._standing].swap(self._shard)
            while self._standing < version:
                self._changes[self._standing].swap(self._shard)
                self._standing += 1

    def advance(self, rows: Tensor | None, before: Tensor) -> None:
        """The shard, which stood at the newest version, now holds the next one.

        Args:
            rows: local rows that changed, (k,); None: any of them. before: their values until now.
        """
        assert self._standing == self.newest, f"{self._name}: stood at {self._standing}, not at {self.newest}"
        self._changes[self.newest] = _Change(rows, before)
        self.newest += 1
        self._standing = self.newest

    def forget(self, before: int) -> None:
        """Nobody will read versions older than `before`."""
        if any(version < before for version in self._changes) and self._standing < before:
            self.stand_at(self.newest)
        self._changes = {version: kept for version, kept in self._changes.items() if version >= before}
