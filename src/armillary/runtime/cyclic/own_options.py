"""Options that an optimizer's own step changes, such as a counter in its groups: found by trying it, never by its type.

A stage is stepped with the options of its gradients' step, and those of before come back afterwards. So such a change
would be undone, or be made once a stage.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.runtime.cyclic.delayed_step import changed_options
from armillary.runtime.hybrid.optimizer_twin import step_alone, tried_alone, twin_to_try

__all__ = ["own_options"]


def own_options(optimizer: Optimizer) -> list[str]:
    """Their names, in any group. Empty also where the optimizer does not step a small matrix; then nobody knows."""
    return sorted({name for group in optimizer.param_groups if group["params"] for name in _changed(optimizer, group)})


def _changed(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    for is_built in (False, True):  # some make their state in the constructor
        with tried_alone(), suppress(Exception):  # whatever stops it; a run will tell
            return list(_changed_by_steps(optimizer, group, is_built))
    return []


def _changed_by_steps(optimizer: Optimizer, group: dict[str, Any], is_built: bool) -> Iterator[str]:
    """Two steps with a gradient, and one without, as when other stages are stepped."""
    like = group["params"][0]
    matrix = nn.Parameter(torch.ones(6, 4, dtype=like.dtype, device=like.device))
    trial = twin_to_try(optimizer, group, [matrix], is_built)
    for gradient in (torch.ones_like(matrix), torch.ones_like(matrix), None):
        before = copy.deepcopy({name: value for name, value in trial.param_groups[0].items() if name != "params"})
        matrix.grad = gradient
        step_alone(trial)
        after = {name: value for name, value in trial.param_groups[0].items() if name != "params"}
        yield from changed_options(before, after)
