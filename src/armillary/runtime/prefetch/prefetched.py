"""One predicted look-up on its way, on every rank: those that predict to make it and those that only serve."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.exchanges.exchange import Counts, Pulled, Staying
from armillary.facts.collectives import Program
from armillary.runtime.hybrid.in_flight import InFlight
from armillary.runtime.hybrid.table import LookUp, RowTable
from armillary.runtime.prefetch.row_moves import RowMoves
from armillary.runtime.transport import Transport

__all__ = ["MASKED", "SENT", "PrefetchedLookup"]

# Requests of `pull_early` still to be made, once ...
MASKED = 2  # ... it is told which rows are unchanged
SENT = 1  # ... those have been sent


@dataclass(eq=False)
class PrefetchedLookup:
    """A look-up of table rows. `before` are those that were predicted of the same table in the batch before.

    Args of note:
        number, bit: its place among the predicted look-ups of its table, and of all.
        keys: sorted distinct, none where this rank only serves. asked, served: rows of and for every rank.
        planned: by rank, whether it predicts to make it.
        moves: of the rows of its table, if unchanged rows are sent before a step; None: all are sent after it.
        may_send: whether rows of the table may still be sent before a step.
    """

    table: RowTable
    number: int
    bit: int
    keys: Tensor
    asked: Counts
    served: Counts
    planned: tuple[bool, ...]
    before: Sequence["PrefetchedLookup"]
    moves: RowMoves | None
    may_send: bool
    look_up: LookUp = field(default_factory=lambda: LookUp(None, None))
    pulled: Pulled | None = None
    is_taken: bool = False
    is_void: bool = False  # rows sent before the step have moved after all
    wanted: Tensor | None = None  # local rows that are asked of this rank
    sent: Tensor | None = None  # those that were sent before the step

    def __post_init__(self) -> None:
        table = self.table
        where = (self.keys, self.asked, self.served, table.shard, table.ownership, table.place)
        if self.goes_early:
            assert table.exchange.pull_early is not None
            staying = Staying(self._unchanged, lambda: self.is_void)
            self.flight = InFlight(table.exchange.pull_early(*where, staying), table.name, 3)
        else:
            self.flight = InFlight(table.exchange.pull(*where), table.name, table.exchange.pull_requests - 1)

    @property
    def goes_early(self) -> bool:
        return self.moves is not None

    @property
    def is_mine(self) -> bool:
        return self.planned[self.table.place.rank]

    def _unchanged(self, rows: Tensor) -> Tensor:
        """Of these local rows, those that no rank is predicted to touch in the batch before."""
        self.wanted = rows
        known = [one.wanted for one in self.before if all(one.planned) and one.wanted is not None]
        if not self.may_send or not known or len(known) < len(self.before):
            unchanged = torch.zeros_like(rows, dtype=torch.bool)
        else:
            unchanged = torch.isin(rows, torch.cat(known), invert=True)
        self.sent = rows[unchanged]
        return unchanged

    @property
    def has_moved(self) -> bool:
        return self.moves is not None and self.sent is not None and self.moves.have_moved(self.sent)

    def finish(self, transport: Transport) -> Pulled:
        if self.pulled is None:
            self.pulled, self.flight.result = self.flight.finish(transport), None
        return self.pulled

    def route_of(self, has_come: Sequence[bool]) -> Program[Pulled]:
        """A pull by those ranks alone that made the look-up; the rows that come with it are theirs already."""
        asks, table = has_come[self.table.place.rank], self.table
        keys, asked = (self.keys, self.asked) if asks else (self.keys[:0], (0,) * len(has_come))
        served = tuple(count if come else 0 for count, come in zip(self.served, has_come, strict=True))
        return table.exchange.pull(keys, asked, served, table.shard, table.ownership, table.place)
