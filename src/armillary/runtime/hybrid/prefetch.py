"""The door to prefetch: what loops, look-ups, backwards and steps tell it, whether it is on or not.

Nobody outside `runtime/prefetch` knows which. Where no table of a plan prefetches, `NoPrefetch` answers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from armillary.runtime.hybrid.in_flight import InFlight
from armillary.runtime.hybrid.table import LookUp, RowTable

__all__ = ["NoPrefetch", "Prefetch", "Rider"]

Leaves = Callable[[], Sequence[Tensor]]  # the tensors of a batch


class Rider(NamedTuple):
    """What goes with a round of look-ups. columns: (ranks, n) float64 for the headers, None for none. flights: programs
    whose next request leaves at the same moment."""

    columns: Tensor | None = None
    flights: Sequence[InFlight] = ()


class Prefetch(Protocol):
    """depth: how many batches a loop draws before their turn."""

    depth: int

    # A loop over batches. Every rank calls each of these.
    def begin_loop(self) -> None:
        """Nothing is predicted yet."""

    def begin_batch(self, batch: Leaves, last: Leaves) -> None:
        """The loop gets `batch`; `last` is the one `depth` after it. Right after a round in which all were idle."""

    def end_loop(self) -> None:
        """What was asked for batches that will not come is not waited for."""

    # A look-up, and a round of look-ups.
    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        """The look-up of these sorted distinct keys, if its rows are here. None: it must be made. Asks nobody."""

    def ride(self, is_idle: bool) -> Rider:
        """What goes with the next round. is_idle: this rank wants no rows by it."""

    def hear(self, columns: Tensor) -> None:
        """A round's headers are here. columns: (ranks, n), what each rank sent by `ride`."""

    # A backward.
    def seal(self) -> None:
        """All ranks were idle: no rank will make another look-up of this batch. Settles what is to be pushed."""


class NoPrefetch:
    """Every look-up is made when it is read."""

    depth = 0

    def begin_loop(self) -> None:
        pass

    def begin_batch(self, batch: Leaves, last: Leaves) -> None:
        pass

    def end_loop(self) -> None:
        pass

    def take(self, table: RowTable, keys: Tensor) -> LookUp | None:
        return None

    def ride(self, is_idle: bool) -> Rider:
        return Rider()

    def hear(self, columns: Tensor) -> None:
        pass

    def seal(self) -> None:
        pass
