"""Options that an optimizer's own step changes, such as a counter in its groups: found by trying it, never by its type.

A stage is stepped with the options of its gradients' step, and those of before come back afterwards. So such a change
would be undone, or be made once a stage.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.runtime.cyclic.delayed_step import changed_options
from armillary.runtime.hybrid.row_update import twin_to_try

__all__ = ["own_options"]


def own_options(optimizer: Optimizer) -> list[str]:
    """Their names, in any group. Empty also where the optimizer does not step a small matrix; then nobody knows."""
    return sorted({name for group in optimizer.param_groups if group["params"] for name in _changed(optimizer, group)})


def _changed(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[str]:
    """Two steps with a gradient, and one without, as when other stages are stepped."""
    options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    like = group["params"][0]
    matrix = nn.Parameter(torch.ones(6, 4, dtype=like.dtype, device=like.device))
    trial = twin_to_try(optimizer, options, [matrix])
    for gradient in (torch.ones_like(matrix), torch.ones_like(matrix), None):
        before = copy.deepcopy({name: value for name, value in trial.param_groups[0].items() if name != "params"})
        matrix.grad = gradient
        try:
            trial.step()
        except Exception:  # whatever stops it; a run will tell
            return
        after = {name: value for name, value in trial.param_groups[0].items() if name != "params"}
        yield from changed_options(before, after)
