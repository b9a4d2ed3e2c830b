"""Predicts look-ups: which parts of a batch a model looks up in which table, learned from its first steps.

What a look-up asks for is a set of rows. It is predictable where that set is always the union of a few views of the
batch's integer tensors: one whole, all but its first or last along a dimension (each word predicts the next), or one
column. Order, shape and repeats do not matter, so flattened, transposed and concatenated ids are found all the same.
Only values are compared; nothing is assumed of the model, and whatever is predicted is compared again when it comes.
Ids drawn inside the model are no union of views and are never predicted.

Learning is by elimination: every view whose rows a look-up did not all ask for is out for good.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.tables.table import RowTable

__all__ = ["LookupPredictor", "View", "views_of"]

LEARNED_BATCHES = 3  # of a loop, in which look-ups not seen before are learned
FAILURES = 2  # running, after which a look-up is not predicted any more
MOST_COLUMNS = 64


class View(NamedTuple):
    """A part of the tensor at `place` in the batch: from `first` along `dim`, of which `cut` are left out; -1: one."""

    place: int
    dim: int = 0
    first: int = 0
    cut: int = 0

    def of(self, leaves: Sequence[Tensor]) -> Tensor | None:
        """None where the batch has no such part."""
        leaf = leaves[self.place] if self.place < len(leaves) else None
        if leaf is None or leaf.dim() <= self.dim or leaf.dtype not in (torch.int64, torch.int32):
            return None
        length = 1 if self.cut < 0 else leaf.shape[self.dim] - self.cut
        if length < 1 or self.first + length > leaf.shape[self.dim]:
            return None
        return leaf.narrow(self.dim, self.first, length)


def views_of(leaves: Sequence[Tensor]) -> Iterator[View]:
    """Every view that is considered."""
    for place, leaf in enumerate(leaves):
        yield View(place)
        for dim, length in enumerate(leaf.shape):
            if length > 1:
                yield from (View(place, dim, 0, 1), View(place, dim, 1, 1))
        if leaf.dim() > 1 and leaf.shape[-1] <= MOST_COLUMNS:
            yield from (View(place, leaf.dim() - 1, column, -1) for column in range(leaf.shape[-1]))


class Pattern:
    """One look-up. possible: views not yet eliminated; chosen: enough of them to make up the rows, or none."""

    def __init__(self, possible: list[View]):
        self.possible, self.chosen = possible, list[View]()
        self.failures = 0

    def give_up(self) -> None:
        self.possible, self.chosen = [], []


class LookupPredictor:
    """By (table, number): of the look-ups a batch brings that table, which it is."""

    def __init__(self) -> None:
        self.patterns: dict[tuple[str, int], Pattern] = {}
        self.made: dict[str, int] = {}  # look-ups of the batch in the loop's hands, by table
        self.left = 0
        self.begin()

    def begin(self) -> None:
        """A new loop: what gave no hope is learned anew."""
        self.patterns = {key: pattern for key, pattern in self.patterns.items() if pattern.chosen}
        self.open_batch([])
        self.left = LEARNED_BATCHES

    def open_batch(self, leaves: Sequence[Tensor]) -> None:
        """The loop gets the batch with these tensors."""
        self.left -= bool(self.made)
        self.leaves = list(leaves)
        self.made = {}
        self.forget_keys()

    def forget_keys(self) -> None:
        """Of the views of this batch, since it is another or they have others."""
        self.keys: dict[tuple[str, View], Tensor | None] = {}

    def notice(self, table: RowTable, keys: Tensor, was_predicted: bool) -> None:
        """A look-up of these distinct sorted keys was made. What was predicted teaches nothing."""
        number = self.made.get(table.name, 0)
        self.made[table.name] = number + 1
        key = (table.name, number)
        if key not in self.patterns and self.left > 0:
            self.patterns[key] = Pattern(list(views_of(self.leaves)))
        pattern = self.patterns.get(key)
        if pattern is None or was_predicted or not pattern.possible:
            return
        pattern.possible = [view for view in pattern.possible if self._lies_in(table, view, keys)]
        pattern.chosen = self._enough(table, pattern.possible, keys)

    def _keys(self, table: RowTable, view: View) -> Tensor | None:
        if (table.name, view) not in self.keys:
            self.keys[table.name, view] = _distinct(table, [view], self.leaves)
        return self.keys[table.name, view]

    def _lies_in(self, table: RowTable, view: View, keys: Tensor) -> bool:
        mine = self._keys(table, view)
        return mine is not None and len(mine) <= len(keys) and bool(torch.isin(mine, keys, assume_unique=True).all())

    def _enough(self, table: RowTable, views: Sequence[View], keys: Tensor) -> list[View]:
        """The views with most rows first, those that add none left out; nothing if all together do not suffice."""
        sized = sorted((-len(mine), view) for view in views if (mine := self._keys(table, view)) is not None)
        chosen: list[View] = []
        union = keys[:0]
        for _, view in sized:
            mine = self._keys(table, view)
            assert mine is not None
            larger = torch.cat([union, mine]).unique()
            if len(larger) > len(union):
                chosen, union = [*chosen, view], larger
        return chosen if len(union) == len(keys) else []

    def predict(self, table: RowTable, leaves: Sequence[Tensor], most: int) -> list[Tensor]:
        """Distinct sorted keys of the look-ups that a batch with these tensors should bring the table, in order, up to
        the first that is not predictable."""
        found: list[Tensor] = []
        while len(found) < most:
            pattern = self.patterns.get((table.name, len(found)))
            keys = _distinct(table, pattern.chosen, leaves) if pattern is not None and pattern.chosen else None
            if keys is None:
                break
            found.append(keys)
        return found

    def judge(self, table: RowTable, number: int, has_come: bool) -> None:
        """Whether the look-up predicted as the table's `number`-th was made."""
        pattern = self.patterns[table.name, number]
        pattern.failures = 0 if has_come else pattern.failures + 1
        if pattern.failures >= FAILURES:
            pattern.give_up()


def _distinct(table: RowTable, views: Sequence[View], leaves: Sequence[Tensor]) -> Tensor | None:
    """The keys of the rows in these views of a batch; None where they cannot be rows of the table."""
    parts = [part.flatten() for view in views if (part := view.of(leaves)) is not None]
    if len(parts) < len(views):
        return None
    ids = torch.cat(parts).long()
    if not ids.numel():
        return None
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= table.shape[0]:
        return None
    keys: Tensor = torch.unique(table.ownership.keys(ids.to(table.shard.device)))  # a loop may move batches itself
    return keys
