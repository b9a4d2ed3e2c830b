"""A step of the user's optimizer on rows whose gradient came after it: exactly the step they missed.

What the optimizer was at its step (options, and state that has no rows: a count of steps) is kept until then. The rows
themselves, and state that has rows, have not moved since: nobody reads a row whose gradient is under way, and tables
with a window are those of which rows without gradient stay put.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.row_update import Held, options_of, twin
from armillary.runtime.hybrid.table import RowTable

__all__ = ["LateSteps", "Moment"]


class Moment(NamedTuple):
    """The optimizer as it was at one step of a table. state: what of it has no rows; None: there was none at all."""

    options: dict[str, Any]
    state: dict[str, Any] | None


class LateSteps:
    """held: the optimizer state of each table's shard, by table and name."""

    def __init__(self, optimizer: Optimizer, held: dict[str, dict[str, Tensor]]):
        self.optimizer, self.held = optimizer, held

    def moment(self, table: RowTable) -> Moment:
        """Now, right before a step."""
        options = options_of(self.optimizer, table.parameter)
        assert options is not None, table.name
        state = self.optimizer.state.get(table.parameter)
        if not state:
            return Moment(_copied(options), None)
        held = self.held[table.name]
        return Moment(_copied(options), _copied({name: value for name, value in state.items() if name not in held}))

    @torch.no_grad()
    def step(self, table: RowTable, moment: Moment, rows: Tensor, sums: Tensor) -> None:
        """The step of that moment on local rows (k,) with their gradient (k, *row shape)."""
        if not len(rows):
            return
        held = self.held[table.name]
        parameter = nn.Parameter(table.shard.index_select(0, rows))
        parameter.grad = sums
        stepper = twin(self.optimizer, moment.options, [parameter])
        if moment.state is not None:
            mine = {name: whole.index_select(0, rows) for name, whole in held.items()}
            stepper.state[parameter] = {**_copied(moment.state), **mine}
        stepper.step()
        table.put_back(rows, parameter.detach())
        _keep(held, rows, stepper.state[parameter], table.shard)


def _keep(held: Held, rows: Tensor, state: dict[str, Any], shard: Tensor) -> None:
    """Puts the rows' state back. New state begins as zero rows."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == (len(rows), *shard.shape[1:]):
            if name not in held:
                held[name] = value.new_zeros(shard.shape)
            held[name].index_copy_(0, rows, value)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name != "params"
    }
