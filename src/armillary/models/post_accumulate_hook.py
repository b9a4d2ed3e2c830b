"""Tells an object when a tensor's gradient is final, without keeping the object alive.

Of a parameter that is when every hook of the user's own has run, whenever it was registered: as under DDP they see
this rank's gradient. Torch calls hooks of a tensor in their order, and those of its accumulator node after them.

To torch's collector a hook of this kind is opaque: one that holds what holds the tensor is a circle through C++ which
is never freed, so a model, its gradients and the optimizer's state would outlive their user (torch 2.13). Here the hook
knows its object weakly; whoever trains keeps it, as the optimizer does through its step hooks.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["after_hooks", "on_grad_accumulated"]

Owner = TypeVar("Owner")


def on_grad_accumulated(
    tensor: Tensor, owner: Owner, told: Callable[[Owner, Tensor], None], name: str = "a tensor"
) -> RemovableHandle:
    """Calls `told(owner, tensor)` whenever backward has made all of a leaf's gradient.

    Args:
        told: must not hold the owner or the tensor. name: of the tensor, for the error.

    Raises (in backward):
        RuntimeError: the owner is gone.
    """
    known = weakref.ref(owner)

    def arrived(leaf: Tensor) -> None:
        here = known()
        if here is None:
            raise _gone(name, tuple(leaf.shape))
        told(here, leaf)

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(arrived)
    return handle


def after_hooks(
    parameter: Tensor, owner: Owner, told: Callable[[Owner, Tensor], None], name: str
) -> Callable[[], None]:
    """Calls `told(owner, arrived)` whenever backward has made all of a parameter's gradient and its hooks have run.
    What is returned takes this back; until then a node of autograd's is kept, which knows the parameter. arrived: what
    this backward brought, whose memory `.grad` may have taken.

    Args:
        told, name: as in `on_grad_accumulated`.

    Raises (in backward):
        RuntimeError: the owner is gone.
    """
    known, shape = weakref.ref(owner), tuple(parameter.shape)

    def arrived(_: Any, gradients: tuple[Tensor, ...]) -> None:
        here = known()
        if here is None:
            raise _gone(name, shape)
        told(here, gradients[0])

    node = [get_gradient_edge(parameter).node]  # the parameter knows it weakly
    handle = node[0].register_hook(arrived)

    def undo() -> None:
        handle.remove()
        node.clear()

    return undo


def _gone(name: str, shape: tuple[int, ...]) -> RuntimeError:
    return RuntimeError(
        f"{name} of shape {shape} got a gradient that nobody exchanges any more: its run and its optimizer are gone. "
        "Keep one of them as long as you train; call run.close() to train without"
    )
