"""What is behind a parameter object: an ordinary parameter or the handle of a table; the object stays the same.

Lists of parameters that a script made before (to clip, to average), an optimizer's groups, its state, tied modules: all
hold the object, so it is the object that changes (`torch.utils.swap_tensors`).
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = ["become", "why_fixed"]


def why_fixed(parameter: Tensor) -> str:
    """Why the object cannot become another tensor, with what to do; empty if it can."""
    if weakref.getweakrefs(parameter):
        return "a weak reference to it is held (weakref, WeakSet); drop it first"
    with torch._C.DisableTorchFunctionSubclass():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a hook is registered on it; put the hook on what the look-up returns"
        count: Callable[[], int] = parameter._use_count  # type: ignore[attr-defined]
        if count() > 1:
            edge = get_gradient_edge(parameter) if parameter.requires_grad and parameter.is_leaf else None
            if edge is None or count() > 2:  # a graph's end is one, a view one more
                return "a view of it is alive, or a graph that took one; delete it first"
    return ""


def become(parameter: Tensor, other: Tensor) -> None:
    """`parameter` is from here on what `other` was; nobody may use `other` any more. Attributes that a script gave to
    the object stay. A graph that ends in it raises if its backward is run.

    Raises:
        ValueError: the object is fixed (`why_fixed`).
    """
    if fixed := why_fixed(parameter):
        raise ValueError(fixed)
    declared = vars(type(parameter)).get("__annotations__", {})
    kept = {name: value for name, value in vars(parameter).items() if name not in declared}
    parameter.grad = None
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, other)
    vars(parameter).update(kept)
