"""A look at a model that leaves it as it was, and the bytes of the tensors made meanwhile.

Profiling runs real training steps before training begins. The training that follows must not be able to tell: weights,
gradients, buffers, attributes and random streams are put back.

Bytes count every operation's results, in backward too. What a kernel needs for itself is not seen (im2col of a
convolution, a library's scratch), nor what another thread makes. It works alike for every device and allocator.

Source: torch.distributed._tools.mem_tracker, which is private, does the same by module.
"""

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Kept", "LiveBytes", "untouched"]


class LiveBytes(TorchDispatchMode):
    """Outside, what was made inside is still followed until it is freed; nothing new is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = self.most_bytes = self.base_bytes = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def mark(self) -> None:
        """From here on `added_bytes` is told."""
        self.base_bytes = self.most_bytes = self.now_bytes

    @property
    def added_bytes(self) -> int:
        """The most there were since `mark`, beyond those there were then."""
        return self.most_bytes - self.base_bytes

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):  # of before this began, or made where nobody looked
            self._follow(storage, 0)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._follow(storage, storage.nbytes())
        return out

    def _follow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self._seen.pop(key, None)
            self.now_bytes -= nbytes

        self._seen[key] = weakref.ref(storage, freed)
        self.now_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.now_bytes)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            yield leaf.untyped_storage()


class Kept:
    """The old values of parameters about to be written to, so that only those cost a copy."""

    def __init__(self) -> None:
        self.values: dict[nn.Parameter, Tensor] = {}

    def keep(self, parameter: nn.Parameter) -> None:
        """Remembers the parameter's value; to be called before its first write."""
        if parameter not in self.values:
            self.values[parameter] = parameter.detach().clone()

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self.values.items():
                parameter.copy_(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Kept]:
    """Restores `model` and the random streams (torch, numpy, random) on the way out, also after an error.

    Gradients are absent inside, and the user's post-accumulate hooks (an optimizer that steps in the backward
    pass, say) are set aside. Parameters are restored where the caller called `keep` before the write; buffers
    always. Attributes of modules get their old objects back; an object changed in place stays changed.
    """
    kept = Kept()
    streams = _streams(model)
    attributes = {module: _attributes(module) for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield kept
    finally:
        for module, fields in attributes.items():
            _restore(module, fields)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        kept.restore()
        for parameter, gradient, mine in zip(parameters, gradients, hooks):
            parameter.grad = gradient
            parameter._post_accumulate_grad_hooks = mine
        _set_streams(*streams)


def _attributes(module: nn.Module) -> dict[str, object]:
    """The module's attributes; its tables of buffers and the like are copied one level deep."""
    return {name: dict(value) if type(value) is dict else value for name, value in vars(module).items()}


def _restore(module: nn.Module, fields: dict[str, object]) -> None:
    """Puts old objects back in place, keeping the identity of the dicts that other code may hold."""
    now = vars(module)
    for name in now.keys() - fields.keys():
        del now[name]
    for name, value in fields.items():
        held = now.get(name)
        if type(value) is dict and type(held) is dict:
            held.clear()
            held.update(value)
        else:
            now[name] = value


Streams = tuple[Tensor, dict[torch.device, Tensor], dict[str, object], tuple[object, ...]]


def _streams(model: nn.Module) -> Streams:
    """State of every random stream a step may draw from; of accelerators, those the model lives on."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    on_device = {device: torch.cuda.get_rng_state(device) for device in devices}
    return torch.get_rng_state(), on_device, np.random.get_state(legacy=False), random.getstate()


def _set_streams(
    host: Tensor, on_device: dict[torch.device, Tensor], arrays: dict[str, object], plain: tuple[object, ...]
) -> None:
    torch.set_rng_state(host)
    for device, state in on_device.items():
        torch.cuda.set_rng_state(state, device)
    np.random.set_state(arrays)
    random.setstate(plain)
