"""A moving average of a run's parameters, as data: what this rank holds of it.

The rule is that of `torch.optim.swa_utils.get_ema_multi_avg_fn`: the first update copies, every later one moves the
average by 1 - decay towards the parameter. It is element-wise, so an owner averages its rows and asks nobody. Rows of
averages stand with their table (`RowTable.averages`), and are moved, saved and loaded as its own rows are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.runtime.hybrid.table import RowTable

__all__ = ["Average", "Pair"]


class Pair(NamedTuple):
    """table: None of a parameter that every rank holds whole."""

    average: Tensor
    value: Tensor
    table: RowTable | None = None


@dataclass(eq=False)
class Average:
    """Of all parameters of a model, trained or not. updates: made so far. whole: by name, of parameters that are no
    tables. is_shown: the model holds the averages, and these the model's values."""

    decay: float
    updates: int = 0
    whole: dict[str, Tensor] = field(default_factory=dict)
    is_shown: bool = False

    @property
    def key(self) -> str:
        """Its name in a checkpoint and with tables."""
        return repr(self.decay)

    @torch.no_grad()
    def begin(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        """From the parameters as they are."""
        self.updates = 0
        values = {name: p.detach().clone() for name, p in model.named_parameters() if name not in tables}
        self.whole = values
        for table in tables.values():
            table.averages[self.key] = table.shard.detach().clone()

    def whole_of(self, tables: Mapping[str, RowTable]) -> dict[str, Tensor]:
        """Those of parameters that are no tables, by name."""
        for name, table in tables.items():
            if self.key not in table.averages:  # it has become a table since
                table.averages[self.key] = table.part_of(self.whole.pop(name)).clone()
        return self.whole

    def pairs(self, model: nn.Module, tables: Mapping[str, RowTable]) -> list[Pair]:
        """What this rank holds of every average, and of what it is one."""
        whole = self.whole_of(tables)
        found = [Pair(table.averages[self.key], table.shard, table) for table in tables.values()]
        parameters = [(name, p) for name, p in model.named_parameters() if name not in tables]
        return [*found, *(Pair(whole[name], p.detach()) for name, p in parameters)]

    @torch.no_grad()
    def update(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        for average, value, _ in self.pairs(model, tables):
            if self.updates == 0:
                average.copy_(value)
            elif average.is_floating_point() or average.is_complex():
                average.lerp_(value, 1 - self.decay)
            else:
                average.copy_(average * self.decay + value * (1 - self.decay))
        self.updates += 1

    @torch.no_grad()
    def swap(self, model: nn.Module, tables: Mapping[str, RowTable]) -> None:
        """Averages go into the model, its values come here; and back."""
        for average, value, table in self.pairs(model, tables):
            if table is None:
                kept = value.clone()
                value.copy_(average)
                average.copy_(kept)
            else:
                table.swap_rows(average)
        self.is_shown = not self.is_shown
