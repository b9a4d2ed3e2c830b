"""How often real batches ask for which rows of a table: alpha, the hottest rows, the load of each owner.

Counts come from ids alone. Repeats inside a worker's batch are merged first, as the exchanges do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.exchanges.ownership import Ownership
from armillary.facts.parameter import RowFacts

__all__ = ["NO_LOOKUPS", "Lookups", "merged", "row_facts"]

HOTTEST = 10


@dataclass(frozen=True)
class Lookups:
    """What one worker's batch asked of one table.

    Args of note:
        calls: gather calls. rows: (distinct,) int64, ascending; counts: (distinct,) int64, how often each.
        asked: distinct rows of each call, added up.
        paddings: the padding rows the calls named, None for a call that named none.
    """

    calls: int
    rows: Tensor
    counts: Tensor
    asked: int
    paddings: frozenset[int | None] = frozenset()

    @property
    def ids(self) -> int:
        return int(self.counts.sum())


NO_LOOKUPS = Lookups(0, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0)


def merged(parts: Sequence[Lookups]) -> Lookups:
    """Several sets of lookups as one: calls and counts add up, rows are united."""
    if not parts:
        return NO_LOOKUPS
    rows, place = torch.cat([part.rows for part in parts]).unique(return_inverse=True)
    counts = torch.zeros_like(rows).index_add_(0, place, torch.cat([part.counts for part in parts]))
    paddings = frozenset[int | None]().union(*(part.paddings for part in parts))
    return Lookups(sum(part.calls for part in parts), rows, counts, sum(part.asked for part in parts), paddings)


def row_facts(rows: int, row_bytes: int, batches: Sequence[Lookups], workers: int, workers_per_node: int) -> RowFacts:
    """The facts of one table from one `Lookups` per batch; worker w's batches are batches[w::workers].

    A last step that lacks batches is left out of everything except `hottest`'s total and `padding_idx`.
    """
    used = batches[: len(batches) // workers * workers]
    nodes = [merged(used[first : first + workers_per_node]) for first in range(0, len(used), workers_per_node)]
    steps = [merged(used[first : first + workers]) for first in range(0, len(used), workers)]
    everything, owners = merged(batches), tuple(range(workers))
    paddings = set(everything.paddings)
    return RowFacts(
        rows=rows,
        row_bytes=row_bytes,
        lookups=sum(batch.calls for batch in used) / len(used),
        ids=sum(batch.ids for batch in used) / len(used),
        alpha_worker=_alpha(used, rows),
        alpha_node=_alpha(nodes, rows),
        alpha_union=_alpha(steps, rows),
        hottest=_hottest(everything),
        load_modulo=_load(used, Ownership(rows, owners, workers, "modulo")),
        load_hashed=_load(used, Ownership(rows, owners, workers, "hashed")),
        load_blocks=_shares([batch.rows // -(-rows // workers) for batch in used], workers),
        padding_idx=paddings.pop() if len(paddings) == 1 else None,
        repeated=_repeated(used, steps, workers),
        asked_rows=sum(batch.asked for batch in used) / len(used),
    )


def _alpha(merges: Sequence[Lookups], rows: int) -> float:
    return sum(len(part.rows) for part in merges) / (len(merges) * rows)


def _repeated(batches: Sequence[Lookups], steps: Sequence[Lookups], workers: int) -> float | None:
    """Share of the rows of a batch that are among those of the step before; None of a single step, or of no rows."""
    later = list(enumerate(batches))[workers:]
    shared = sum(int(torch.isin(batch.rows, steps[place // workers - 1].rows).sum()) for place, batch in later)
    total = sum(len(batch.rows) for _, batch in later)
    return shared / total if total else None


def _hottest(lookups: Lookups) -> tuple[tuple[int, float], ...]:
    """The rows asked for most, ties in row order, each with its share of all ids."""
    order = torch.sort(lookups.counts, descending=True, stable=True).indices[:HOTTEST]
    total = max(lookups.ids, 1)
    return tuple((int(lookups.rows[place]), int(lookups.counts[place]) / total) for place in order)


def _load(batches: Sequence[Lookups], ownership: Ownership) -> tuple[float, ...]:
    """Each owner's share when rows are dealt out as the exchange over owned rows does."""
    return _shares([ownership.keys(batch.rows) // ownership.capacity for batch in batches], ownership.workers)


def _shares(owners: Sequence[Tensor], workers: int) -> tuple[float, ...]:
    """Each owner's share of all rows sent; equal shares if none is."""
    counts = torch.cat(list(owners)).bincount(minlength=workers).tolist()
    total = sum(counts)
    return tuple(count / total for count in counts) if total else (1 / workers,) * workers
