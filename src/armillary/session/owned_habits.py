"""Habits of a loop that a schedule which owns it cannot serve, in the words in which they are refused.

Its gradients are made on copies of the parameters that the stages read, of several ages, and no parameter's own hook
hears of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["gradient_hooks", "unserved"]

OWN_LOOP = "keep a loop of your own, by a plan without a schedule"


def unserved(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """What speaks against steps by `run.step`, with its remedy."""
    yield from gradient_hooks(dict(model.named_parameters()))


def gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Hooks of the user's, that wait for gradients of parameters, by name."""
    with torch._C.DisableTorchFunctionSubclass():  # tables, too, are asked plainly
        hooked = [name for name, one in parameters.items() if one.requires_grad and _hooks(one)]
        if hooked:
            more = f" (and so have {len(hooked) - 1} more)" if len(hooked) > 1 else ""
            yield (
                f"{hooked[0]} has a gradient hook ({_names(_hooks(parameters[hooked[0]]))}){more}, which no step would "
                f"call; take it off, or {OWN_LOOP}"
            )


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    return [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]


def _names(hooks: Iterable[Callable[..., Any]]) -> str:
    return ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
