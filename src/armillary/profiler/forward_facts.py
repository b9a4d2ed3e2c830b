"""What one forward and its loss show beside the profile: recurrences, a causal mask, classes; and how long it takes.

A module counts as a cell in a loop of the model's own where it is called again on what it gave before.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from armillary.models.preserved_state import untouched
from armillary.plans.advice import ForwardFacts, Recurrent

__all__ = ["forward_facts"]

Loss = Callable[[nn.Module, Any], Tensor]
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def forward_facts(model: nn.Module, batch: Any, loss: Loss, is_stream: bool) -> ForwardFacts:
    """The model stays as it was."""
    with untouched(model), torch.enable_grad():
        loss(model, batch)  # warms up
        began = time.perf_counter()
        loss(model, batch)
        seconds = time.perf_counter() - began
        with _calls(model) as calls, _Functions() as functions:
            loss(model, batch)
    return ForwardFacts(seconds, tuple(calls.found()), functions.is_causal, functions.classes, is_stream)


class _Calls:
    """How often each module was called, and how often on what it gave before."""

    def __init__(self) -> None:
        self.steps: dict[str, Recurrent] = {}
        self.again: dict[str, int] = {}
        self.gave: dict[str, list[Tensor]] = {}

    def entered(self, path: str, module: nn.Module, args: Any) -> None:
        given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        before = self.gave.get(path, ())
        if any(one is other for one in given for other in before):
            self.again[path] = self.again.get(path, 1) + 1
        if isinstance(module, nn.RNNBase) and args:
            self._sequence(path, module, args[0])

    def left(self, path: str, output: Any) -> None:
        self.gave[path] = [one for one in tree_leaves(output) if isinstance(one, Tensor)]

    def _sequence(self, path: str, module: nn.RNNBase, given: Any) -> None:
        if isinstance(given, PackedSequence):
            steps = len(given.batch_sizes)
        else:
            steps = given.shape[1 if module.batch_first and given.dim() == 3 else 0]
        if path not in self.steps or self.steps[path].steps < steps:
            self.steps[path] = Recurrent(path, module.mode, steps, False)

    def found(self) -> Iterator[Recurrent]:
        yield from self.steps.values()
        inner = {path for path in self.again if any(path.startswith(f"{other}.") for other in self.again)}
        inner |= {path for path in self.again if path in self.steps}
        yield from (Recurrent(path, "", many, True) for path, many in self.again.items() if path not in inner)


@contextmanager
def _calls(model: nn.Module) -> Iterator[_Calls]:
    seen, handles = _Calls(), []
    for path, module in model.named_modules():
        if path:
            before = lambda module, args, path=path: seen.entered(path, module, args)  # noqa: E731
            after = lambda module, args, output, path=path: seen.left(path, output)  # noqa: E731
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.is_causal, self.classes = False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTION and kwargs.get("is_causal"):
            self.is_causal = True
        if func is F.cross_entropy:
            self._labels(args, kwargs)
        return func(*args, **kwargs)

    def _labels(self, args: Any, kwargs: Any) -> None:
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        logits, labels = given["input"], given["target"]
        if logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
            self.classes = logits.shape[1]
