"""The catch-up step: a step of the user's optimizer on rows whose gradient came after it: exactly the step they missed.

What the optimizer was at its step (options, and state that has no rows: a count of steps) is kept until then. The rows
themselves, and state that has rows, have not moved since: nobody reads a row whose gradient is under way, and tables
with a window are those of which rows without gradient stay put.
"""

import copy
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.optimizer_twin import options_of
from armillary.runtime.hybrid.prefetch import Stepper
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.hybrid.table import RowTable

__all__ = ["CatchUpMoment", "can_split", "catch_up", "moment_of"]

# Of every optimizer of torch, and what its schedulers add.
_ATTRIBUTES = {
    *("defaults", "state", "param_groups", "step", "_opt_called"),
    *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *(f"_optimizer_{way}_{when}_hooks" for way in ("state_dict", "load_state_dict") for when in ("pre", "post")),
}


class CatchUpMoment(NamedTuple):
    """The optimizer as it was at one step of a table. state: what of it has no rows; None: there was none at all."""

    options: dict[str, Any]
    state: dict[str, Any] | None


def can_split(optimizer: Optimizer, table: RowTable) -> bool:
    """Whether a step in two parts is the same bit for bit: vector and scalar code of torch's kernels round alike in
    single and double precision, unless they are fused; and nothing is kept in attributes, which nobody could put back
    to what they were."""
    options = options_of(optimizer, table.parameter) or {}
    is_plain = table.shard.dtype in (torch.float32, torch.float64) and not options.get("fused")
    return is_plain and not table.lists_rows and not set(vars(optimizer)) - _ATTRIBUTES


def moment_of(stepper: Stepper, table: RowTable) -> CatchUpMoment | None:
    """Now, right before a step; None where the optimizer does not hold the table."""
    optimizer, held = stepper.optimizer, stepper.held[table.name]
    options = options_of(optimizer, table.parameter)
    if options is None:
        return None
    state = optimizer.state.get(table.parameter)
    if not state:
        return CatchUpMoment(_copied(options), None)
    return CatchUpMoment(_copied(options), _copied({name: value for name, value in state.items() if name not in held}))


@torch.no_grad()
def catch_up(stepper: Stepper, table: RowTable, moment: CatchUpMoment, rows: Tensor, sums: Tensor) -> None:
    """The step of that moment on local rows (k,) with their gradient (k, *row shape)."""
    if not len(rows):
        return
    held = stepper.held[table.name]
    parameter = nn.Parameter(table.shard.index_select(0, rows))
    parameter.grad = sums
    same = _same(stepper.optimizer, moment.options, parameter)
    if moment.state is not None:
        mine = {name: whole.index_select(0, rows) for name, whole in held.items()}
        same.state[parameter] = {**_copied(moment.state), **mine}
    same.step()
    table.put_back(rows, parameter.detach())
    _keep(held, rows, same.state[parameter], table.shard)


def _same(optimizer: Optimizer, options: dict[str, Any], parameter: nn.Parameter) -> Optimizer:
    """Over another parameter, without state and hooks. It keeps nothing in attributes, see `can_split`."""
    other = copy.copy(optimizer)
    other.param_groups = [{**options, "params": [parameter]}]
    other.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(other, hooks, type(getattr(optimizer, hooks))())
    return other


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
