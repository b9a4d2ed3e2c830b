"""Gradients of a table that may follow later, or none: what the prefetcher asks of either."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from armillary.runtime.hybrid.prefetch import Stepper
from armillary.runtime.hybrid.table import RowTable

__all__ = ["Delay", "NoDelay", "Unused"]

Unused = tuple[Tensor, Tensor]  # (rows served,) and (rows asked for,) bool: which of them no rank reads next


class Delay(Protocol):
    """What `Prefetch` says of hold, step, join, finish and hold_no_more holds here."""

    def delays(self, table: RowTable) -> bool:
        """Whether gradients of this table may wait, if it is known which."""

    def is_holding(self, table: RowTable) -> bool: ...

    def split(
        self, table: RowTable, gradients: list[Tensor], routes: list[Any], unused: Sequence[Unused | None]
    ) -> tuple[list[Tensor], list[Any]]:
        """unused: by route; None where nobody told."""

    def arrive(self) -> None:
        """What is under way lands and is stepped. Asks nobody."""

    def leave(self) -> None:
        """A batch begins, on every rank: what waits is sent."""

    def begin_push(self) -> None: ...

    def see_reads(self, read_at: Sequence[float]) -> None:
        """A rank reads rows, at these steps of all ranks."""

    def step(self, stepper: Stepper) -> None: ...
    def join(self) -> None: ...
    def finish(self) -> None: ...
    def hold_no_more(self) -> None: ...


class NoDelay:
    """Every gradient leaves at once."""

    def delays(self, table: RowTable) -> bool:
        return False

    def is_holding(self, table: RowTable) -> bool:
        return False

    def split(
        self, table: RowTable, gradients: list[Tensor], routes: list[Any], unused: Sequence[Unused | None]
    ) -> tuple[list[Tensor], list[Any]]:
        return gradients, routes

    def arrive(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def begin_push(self) -> None:
        pass

    def see_reads(self, read_at: Sequence[float]) -> None:
        pass

    def step(self, stepper: Stepper) -> None:
        pass

    def join(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def hold_no_more(self) -> None:
        pass
