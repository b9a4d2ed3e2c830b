"""Hooks on gradients: ours, which tell an object that one is final, and what those of the user's do inside a backward.

Of a parameter a gradient is final when every hook of the user's own has run, whenever it was registered: as under DDP
they see this rank's gradient. Torch calls hooks of a tensor in their order, and those of its accumulator node after
them. To torch's collector a hook of this kind is opaque: one that holds what holds the tensor is a circle through C++
which is never freed, so a model, its gradients and the optimizer's state would outlive their user (torch 2.13). Here
the hook knows its object weakly; whoever trains keeps it, as the optimizer does through its step hooks.

A user's hook may change its gradient before it is exchanged, as under DDP. One that takes it away, that steps an
optimizer, or that writes to a gradient which is under way would part the ranks, and is refused by name.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["Backward", "after_hooks", "on_grad_accumulated", "refuse_step_inside", "refuse_taken"]

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


REMEDY = "step after backward() has returned: gradients are the mean over ranks only then"


def refuse_step_inside(rank: int) -> None:
    """
    Raises:
        RuntimeError: a backward is going on.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"rank {rank}: optimizer.step() was called inside a backward (by a hook?), with gradients of this rank's "
            f"own; {REMEDY}"
        )


def refuse_taken(rank: int, name: str, parameter: Tensor) -> Tensor:
    """The gradient that has just arrived.

    Raises:
        RuntimeError: a hook has set `.grad` to None.
    """
    if parameter.grad is None:
        raise RuntimeError(
            f"rank {rank}: {_hooks_on([parameter])} set {name}.grad to None inside the backward, before it was "
            f"exchanged, as an optimizer does that steps in a hook; {REMEDY}"
        )
    return parameter.grad


@dataclass(eq=False)
class Backward:
    """From its first gradient to its end. named: parameters that all ranks hold alike."""

    rank: int
    named: Mapping[str, nn.Parameter]
    _written: list[int] = field(default_factory=list)  # how often each parameter had been written to
    _left: dict[str, tuple[Tensor | None, int]] = field(default_factory=dict)  # gradients in buckets, likewise

    def begin(self) -> None:
        self._written = [parameter._version for parameter in self.named.values()]
        self._left = {}

    def leaves(self, name: str) -> None:
        """The gradient of this parameter lies in its bucket."""
        if (parameter := self.named.get(name)) is not None and parameter.grad is not None:
            self._left[name] = parameter.grad, parameter.grad._version

    def end(self) -> None:
        """
        Raises:
            RuntimeError: a parameter, or a gradient under way, was written to.
        """
        for name, (gradient, version) in self._left.items():
            parameter = self.named[name]
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                raise RuntimeError(
                    f"rank {self.rank}: {_hooks_on([parameter])} changed {name}.grad inside the backward, when it was "
                    "being exchanged (an optimizer that steps there?); change gradients in a hook of the parameter "
                    f"(register_post_accumulate_grad_hook), and {REMEDY}"
                )
        pairs = zip(self.named.items(), self._written, strict=True)
        changed = {name: parameter for (name, parameter), version in pairs if parameter._version != version}
        hooked = [parameter for parameter in self.named.values() if _is_hooked(parameter)] if changed else []
        if changed and hooked:
            raise RuntimeError(
                f"rank {self.rank}: {next(iter(changed))} was written to inside a backward, with gradients of this "
                f"rank's own, as by {_hooks_on(hooked)}; {REMEDY}"
            )
        self._left = {}


def _is_hooked(parameter: Tensor) -> bool:
    return bool(_own_hooks(parameter)) or hasattr(parameter, "_in_backward_optimizers")


def _own_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """Of the user's, that run when its gradient has been added up."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("armillary.")]


def _hooks_on(parameters: Sequence[Tensor]) -> str:
    """What may have done it, in words."""
    hooks = [hook for one in parameters for hook in _own_hooks(one)]
    names = dict.fromkeys(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
    if names:
        return f"the gradient hook {', '.join(names)}"
    applied = any(hasattr(one, "_in_backward_optimizers") for one in parameters)
    return "an optimizer that _apply_optimizer_in_backward put there" if applied else "a hook of a gradient accumulator"
