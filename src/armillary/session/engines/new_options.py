"""What an optimizer may not come to hold, or to be told, while a run is open: found when it is about to step."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.optimizer_trial import leaves_untouched_rows
from armillary.runtime.hybrid.optimizer_twin import options_of
from armillary.runtime.hybrid.optimizers import holder
from armillary.runtime.hybrid.table import RowTable

__all__ = ["WindowOptions", "refuse_strangers"]


def refuse_strangers(rank: int, model: nn.Module, optimizer: Optimizer, known: Container[Tensor]) -> None:
    """Parameters that learn but are not in the plan would drift apart on the ranks.

    Raises:
        ValueError: there is one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in known:
                name = next((name for name, p in model.named_parameters() if p is parameter), None)
                raise ValueError(
                    f"rank {rank}: {name or 'a parameter outside the model'} {tuple(parameter.shape)} has a gradient "
                    "but is not in the plan (unfrozen after attach?); call run.close(), which makes the model plain, "
                    "plan again and attach anew"
                )


@dataclass(eq=False)
class WindowOptions:
    """A window is exact as long as the optimizer leaves rows without gradient alone; options may change that.

    Args:
        lazy: names of tables where that may be.
    """

    rank: int
    optimizer: Optimizer
    lazy: Container[str]
    _seen: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the optimizer for each window

    def refuse_new(self, windows: Iterable[RowTable]) -> None:
        """
        Raises:
            ValueError: rows would move that get no gradient.
        """
        for table in windows:
            group = options_of(self.optimizer, table.parameter)
            if group is None or table.name in self.lazy:
                continue
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if self._seen.setdefault(table.name, options) != options:
                if not leaves_untouched_rows(holder(self.optimizer, table.parameter), group, table.parameter):
                    raise ValueError(
                        f"rank {self.rank}: {table.name}: the optimizer's options are now {options}, with which rows "
                        "move that get no gradient; set them before attach, or plan the table as lazy"
                    )
                self._seen[table.name] = options
