"""Habits of a loop that a schedule which owns it cannot serve, in the words in which they are refused.

Its gradients are made on copies of the parameters that the stages read, of several ages, and no parameter's own hook
hears of them. Its stages are stepped at different times, each with the options of its gradients' step.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.runtime.cyclic.own_options import own_options
from armillary.runtime.hybrid.optimizer_trial import why_not_by_parameter
from armillary.runtime.hybrid.optimizers import hooks_beside, kind_of, members

__all__ = ["gradient_hooks", "joins_parameters", "of_optimizer", "step_hooks", "unserved"]

OWN_LOOP = "keep a loop of your own, by a plan without a schedule"


def unserved(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """What speaks against steps by `run.step`, with its remedy."""
    yield from gradient_hooks(dict(model.named_parameters()))
    yield from of_optimizer(optimizer)


def of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    """What speaks against any schedule that owns the loop, also behind a loop of the user's."""
    yield from step_hooks(optimizer)
    for one in members(optimizer):
        if found := own_options(one):
            yield (
                f"{type(one).__name__} changes its options {', '.join(found)} when it steps, as a trial shows, which "
                f"would be undone; take one that keeps such numbers in its state, or {OWN_LOOP}"
            )


def joins_parameters(optimizer: Optimizer) -> Iterator[str]:
    """What speaks against a schedule that steps the stages of a model apart."""
    for one in members(optimizer):
        reasons = [why_not_by_parameter(one, group) for group in one.param_groups if group["params"]]
        if why := next(filter(None, reasons), ""):
            yield (
                f"its stages are stepped apart, which {type(one).__name__} cannot be: {why}; take one that steps each "
                f"parameter by itself, clip by the schedule's clip_norm, or {OWN_LOOP}"
            )


def gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Hooks of the user's, that wait for gradients of parameters, by name."""
    with torch._C.DisableTorchFunctionSubclass():  # tables, too, are asked plainly
        hooked = [name for name, one in parameters.items() if _is_hooked(one) and one.requires_grad]
        if hooked:
            more = f" (and so have {len(hooked) - 1} more)" if len(hooked) > 1 else ""
            yield (
                f"{hooked[0]} has a gradient hook ({_names(_hooks(parameters[hooked[0]]))}){more}, which no step would "
                f"call; take it off, or {OWN_LOOP}"
            )


def step_hooks(optimizer: Optimizer, mine: Container[int] = ()) -> Iterator[str]:
    """Hooks of the user's, that run with the optimizer's steps. mine: ids of the run's own.

    A step of training steps the optimizer once a stage, or once more before the model is looked at.
    """
    if hooks := hooks_beside(optimizer, mine):
        yield (
            f"{kind_of(optimizer)} has a step hook ({_names(hooks)}), which would not run once a step with all its "
            "gradients, and whose changes of options would be undone; take it off, and do its work after each step"
        )


def _is_hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    return [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]


def _names(hooks: Iterable[Callable[..., Any]]) -> str:
    return ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
