"""One step of the user's optimizer for some parameters only, with the options of an earlier training step.

Under a staggered schedule the stages of one training step are updated at different times, when the user's scheduler may
have moved on. Rate, momentum and weight decay belong to the training step of the gradient, so they are kept from then.
The optimizer object stays the user's: it skips parameters without gradient, which here are all the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Options", "options_of", "refuse_gradients", "step_with"]

Options = list[dict[str, Any]]  # per parameter group, everything but the parameters


def options_of(optimizer: Optimizer) -> Options:
    """The options of all groups as they are now; a learning rate that is a tensor is copied."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def step_with(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], options: Options) -> None:
    """Steps the parameters of `gradients` under `options`; everything else stays as it is.

    Raises:
        RuntimeError: another parameter has a gradient, which this step would apply as well.
    """
    refuse_gradients(optimizer)
    kept = [dict(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, options, strict=True):
        group.update(then)
    for parameter, gradient in gradients.items():
        # Fused optimizers walk over weight and gradient in the order of memory.
        parameter.grad = (
            torch.empty_like(parameter).copy_(gradient) if _lies_otherwise(gradient, parameter) else gradient
        )
    optimizer.step()
    for parameter in gradients:
        parameter.grad = None
    for group, now in zip(optimizer.param_groups, kept):
        group.update(now)


def _lies_otherwise(gradient: Tensor, parameter: nn.Parameter) -> bool:
    return gradient.stride() != parameter.stride()


def refuse_gradients(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: a parameter has a gradient that no schedule made.
    """
    found = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if found:
        raise RuntimeError(
            f"delayed step: {len(found)} parameters of shapes {found[:3]} have gradients that no schedule made; "
            f"call optimizer.zero_grad(set_to_none=True), and leave backward to the schedule"
        )
