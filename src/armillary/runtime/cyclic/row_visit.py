"""What the forward of one stage reads of row-sharded tables for one micro-batch, at one version.

A look-up needs the other ranks, which know from the schedule when it comes but not from the data. So the look-ups of a
forward have a fixed order, that of the example the run began with; one that a forward leaves out is made without rows,
in its turn. The rows that come are leaves of the graph, and stay between forward and backward with the activation:
backward needs nothing of the table, and a stage that runs again before its backward finds them here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.exchange import Pulled

__all__ = ["Desk", "Visit"]

Pull = Callable[[int, Tensor], Pulled]  # number of a table, sorted distinct keys -> its rows


@dataclass(eq=False)
class Desk:
    """Where the reads of a stage arrive: at the visit that is open, if one is."""

    visit: "Visit | None" = None


@dataclass(eq=False)
class _LookUp:
    """rows: leaf of the graph until backward; None if this rank only served. gradient: of the rows, if it has one."""

    table: int
    keys: Tensor
    rows: Tensor | None
    route: Any
    gradient: Tensor | None = None


@dataclass(eq=False)
class Visit:
    """
    Args:
        label: of the stage, for errors.
        order: numbers of the tables in the order of their look-ups.
        nothing: no keys, on the device of the tables.
    """

    label: str
    order: Sequence[int]
    pull: Pull
    desk: Desk
    nothing: Tensor
    look_ups: list[_LookUp] = field(default_factory=list)
    again: list[_LookUp] | None = None  # still to be repeated by a second run

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a run of the forward: its reads arrive here."""
        is_first = not self.look_ups
        self.again = None if is_first else [look_up for look_up in self.look_ups if look_up.rows is not None]
        self.desk.visit = self
        try:
            yield
        finally:
            self.desk.visit = None
        if is_first:
            self.serve()

    def serve(self) -> None:
        """Makes the look-ups that are left, without rows of this rank's own."""
        while len(self.look_ups) < len(self.order):
            self._look_up(self.order[len(self.look_ups)], None)

    def read(self, table: int, name: str, keys: Tensor) -> Tensor:
        """keys: sorted, distinct. Returns their rows, a leaf.

        Raises:
            RuntimeError: one look-up more than the example made, or in another order; or a second run that differs.
        """
        if self.again is not None:
            return self._repeated(table, name, keys)
        while len(self.look_ups) < len(self.order):
            due = self.order[len(self.look_ups)]
            if due == table:
                return self._look_up(due, keys)
            self._look_up(due, None)
        raise RuntimeError(
            f"{self.label}: a look-up of {name} came after the {len(self.order)} that the example made; a forward must "
            f"look up its row-sharded tables in one order, and none more often than the example does. Give attach an "
            f"example that makes all look-ups, or plan {name} without rows"
        )

    @property
    def leaves(self) -> list[Tensor]:
        """Rows that this rank read."""
        return [look_up.rows for look_up in self.look_ups if look_up.rows is not None]

    def receive(self, gradients: Sequence[Tensor | None]) -> None:
        """Of `leaves`, in their order."""
        asked = [look_up for look_up in self.look_ups if look_up.rows is not None]
        for look_up, gradient in zip(asked, gradients, strict=True):
            look_up.gradient, look_up.rows = gradient, None

    def of_table(self, table: int) -> list[_LookUp]:
        """The look-ups of one table, in their order."""
        return [look_up for look_up in self.look_ups if look_up.table == table]

    def _look_up(self, table: int, keys: Tensor | None) -> Tensor:
        asked = self.nothing if keys is None else keys
        with torch.no_grad():
            pulled = self.pull(table, asked)
        rows = pulled.rows
        self.look_ups.append(_LookUp(table, asked, None if keys is None else rows.requires_grad_(), pulled.route))
        return rows

    def _repeated(self, table: int, name: str, keys: Tensor) -> Tensor:
        assert self.again is not None
        look_up = self.again.pop(0) if self.again else None
        if look_up is None or look_up.table != table or not torch.equal(look_up.keys, keys):
            raise RuntimeError(
                f"{self.label}: recomputation looks up other rows of {name} than the forward did; ids must depend on "
                f"the batch and the stage's own random numbers alone"
            )
        assert look_up.rows is not None
        return look_up.rows
