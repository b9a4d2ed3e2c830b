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

__all__ = ["Options", "changed_options", "options_of", "refuse_gradients", "refuse_own_options", "step_with"]

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
        RuntimeError: another parameter has a gradient, which this step would apply as well; or the step changed an
            option, which would be lost.
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
    given = [dict(group) for group in optimizer.param_groups]
    optimizer.step()
    refuse_own_options(optimizer, given)
    for parameter in gradients:
        parameter.grad = None
    for group, now in zip(optimizer.param_groups, kept):
        group.update(now)


def refuse_own_options(optimizer: Optimizer, given: Options) -> None:
    """Of most optimizers that change their options this is found before training, by trying them; see `own_options`.

    Args:
        given: groups as they were just before the step.

    Raises:
        RuntimeError: the step has changed an option.
    """
    found = {name for group, then in zip(optimizer.param_groups, given) for name in changed_options(then, group)}
    if found:
        raise RuntimeError(
            f"delayed step: {type(optimizer).__name__} changed its options {', '.join(sorted(found))} by itself, and "
            "options are put back after each step. Take an optimizer that keeps such numbers in its state, or keep a "
            "loop of your own, by a plan without a schedule"
        )


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of those that are new or have another value."""
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return isinstance(before, Tensor) and isinstance(after, Tensor) and torch.equal(before, after)
    return bool(before == after)


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
