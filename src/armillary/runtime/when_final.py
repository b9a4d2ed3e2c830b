"""Tells an object when a tensor's gradient is final, without keeping the object alive.

To torch's collector a hook of this kind is opaque: one that holds what holds the tensor is a circle through C++ which
is never freed, so a model, its gradients and the optimizer's state would outlive their user (torch 2.13). Here the hook
knows its object weakly; whoever trains keeps it, as the optimizer does through its step hooks.
"""

import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["when_final"]

Owner = TypeVar("Owner")


def when_final(
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
            raise RuntimeError(
                f"{name} of shape {tuple(leaf.shape)} got a gradient that nobody exchanges any more: its run and its "
                "optimizer are gone. Keep one of them as long as you train; call run.close() to train without"
            )
        told(here, leaf)

    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(arrived)
    return handle
