"""Measures a model stage by stage, each alone on the input that it gets in the model, so that one that does not fit can
be measured.

One forward whose saved tensors are thrown away tells every stage its input. Then each stage runs forward and backward
on it, cut off from the others; what runs outside them runs with their outputs in place of their passes.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from armillary.models.preserved_state import LiveBytes, untouched
from armillary.residency.stage_costs import StageCost
from armillary.residency.swap import SMALL_BYTES, storage_of

__all__ = ["Measured", "measure_stages"]

ROUNDS = 3
Loss = Callable[[nn.Module, Any], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    stages: tuple[StageCost, ...]
    outside: StageCost


@dataclass
class _Seen:
    """What a stage was given and returned in the model, detached; how often it was called, under what autocast."""

    call: Call | None = None
    output: Any = None
    calls: int = 0
    autocast: tuple[torch.autocast, ...] = ()


def measure_stages(
    model: nn.Module,
    paths: tuple[str, ...],
    batch: Any,
    loss: Loss,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Measured:
    """The model, its gradients and the random state are left as they were.

    Args:
        tell: called with how many stages are done, of how many.

    Raises:
        ValueError: a stage is not called by loss(model, batch).
    """
    modules = dict(model.named_modules())
    stages = {path: modules[path] for path in paths}
    with untouched(model), torch.enable_grad():
        seen = _inputs(model, stages, batch, loss)
        uncalled = [path for path in paths if not seen[path].calls]
        if uncalled:
            raise ValueError(f"residency: loss(model, batch) does not call {uncalled}; leave them out of stages=")
        costs = []
        for number, (path, stage) in enumerate(stages.items()):
            tell(number, len(stages))
            with ExitStack() as autocast:
                for one in seen[path].autocast:
                    autocast.enter_context(one)
                costs.append(_cost(path, stage, seen[path]))
        outside = _outside(model, stages, seen, batch, loss)
        tell(len(stages), len(stages))
    return Measured(tuple(costs), outside)


def _inputs(model: nn.Module, stages: Mapping[str, nn.Module], batch: Any, loss: Loss) -> dict[str, _Seen]:
    seen = {path: _Seen() for path in stages}
    handles = []
    for path, stage in stages.items():

        def before(_: nn.Module, args: Any, kwargs: Any, one: _Seen = seen[path]) -> None:
            one.calls += 1
            one.autocast = tuple(
                torch.autocast(device, torch.get_autocast_dtype(device))
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            )
            one.call = tree_map(_copied, (args, kwargs))  # copied, as the stage may write into it

        def after(_: nn.Module, args: Any, output: Any, one: _Seen = seen[path]) -> None:
            one.output = tree_map(_detached, output)

        handles += [stage.register_forward_pre_hook(before, with_kwargs=True), stage.register_forward_hook(after)]
    try:
        with _saves_nothing():
            loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _saves_nothing() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept)


def _copied(leaf: Any) -> Any:
    """A value of its own, which asks for a gradient where it did before."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _entered(call: Call) -> Call:
    """The input as a stage gets it in the model: no leaf, so that it may be written in place."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_().view_as(leaf) if leaf.requires_grad else leaf.clone()

    args, kwargs = tree_map(one, call)
    return args, kwargs


def _cost(path: str, stage: nn.Module, seen: _Seen) -> StageCost:
    assert seen.call is not None
    only_keep = "it is called more than once in a forward" if seen.calls > 1 else ""
    saved = _saved_bytes(stage, seen.call)
    bytes_of = _Fullest(stage, seen.call)
    forwards, backwards = _seconds(stage, seen.call)
    no_recompute = "" if only_keep else _why_not_again(stage, seen.call)
    return StageCost(
        path=path,
        forward_seconds=forwards,
        backward_seconds=backwards,
        input_bytes=sum(one.nbytes for one in _tensors(seen.call)),
        saved_bytes=saved.all_bytes,
        small_bytes=saved.small_bytes,
        forward_extra_bytes=max(0, bytes_of.forward - saved.all_bytes),
        unsaved_forward_bytes=bytes_of.unsaved,
        backward_extra_bytes=max(0, bytes_of.backward - bytes_of.gradients),
        gradient_bytes=bytes_of.gradients,
        only_keep=only_keep,
        no_recompute=no_recompute,
    )


@dataclass(frozen=True)
class _Saved:
    all_bytes: int
    small_bytes: int


def _saved_bytes(stage: nn.Module, call: Call) -> _Saved:
    """Storages that autograd keeps of one forward, each once, without parameters, buffers, input and output."""
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) is not None:
            held[storage._cdata] = storage
        return tensor

    args, kwargs = _entered(call)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        output = stage(*args, **kwargs)
    for tensor in (*_tensors((args, kwargs, output)), *stage.parameters(), *stage.buffers()):
        if (storage := storage_of(tensor)) is not None:
            held.pop(storage._cdata, None)
    sizes = [storage.nbytes() for storage in held.values()]
    return _Saved(sum(sizes), sum(one for one in sizes if one < SMALL_BYTES))


class _Fullest:
    """Bytes of one forward and backward at their fullest: beside the output, and beside what lies there before."""

    def __init__(self, stage: nn.Module, call: Call) -> None:
        args, kwargs = _entered(call)
        live = LiveBytes()
        with live, _saves_nothing():
            live.mark()
            output = stage(*args, **kwargs)
        self.unsaved = max(0, live.added_bytes - _own_bytes(output, (args, kwargs)))
        del output
        args, kwargs = _entered(call)
        live = LiveBytes()
        with live:
            live.mark()
            output = stage(*args, **kwargs)
            self.forward = max(0, live.added_bytes - _own_bytes(output, (args, kwargs)))
            grads = _ones(output)
            live.mark()
            _backward(output, grads)
            self.backward = live.added_bytes
        self.gradients = sum(one.grad.nbytes for one in stage.parameters() if one.grad is not None)
        _drop_gradients(stage)


def _own_bytes(output: Any, call: Any) -> int:
    """Of the output's storages, those that are not the input's."""
    theirs = {storage._cdata for one in _tensors(call) if (storage := storage_of(one)) is not None}
    own = {storage._cdata: storage.nbytes() for one in _tensors(output) if (storage := storage_of(one)) is not None}
    return sum(nbytes for address, nbytes in own.items() if address not in theirs)


def _seconds(stage: nn.Module, call: Call) -> tuple[float, float]:
    forwards, backwards = [], []
    for _ in range(ROUNDS + 1):  # the first warms up
        args, kwargs = _entered(call)
        _finish(args)
        began = time.perf_counter()
        output = stage(*args, **kwargs)
        _finish(args)
        forwards.append(time.perf_counter() - began)
        grads = _ones(output)
        began = time.perf_counter()
        _backward(output, grads)
        _finish(args)
        backwards.append(time.perf_counter() - began)
        _drop_gradients(stage)
    return min(forwards[1:]), min(backwards[1:])


def _why_not_again(stage: nn.Module, call: Call) -> str:
    """Whether a second run gives the same output, from the buffers that the first one left. A table that is read by row
    may lie on other ranks, which would be asked a second time."""
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in stage.modules()):
        return "it reads a table by row"
    devices = sorted({one.device.index for one in _tensors(call) if one.device.type == "cuda"})
    outputs = []
    for _ in range(2):
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(0)
            args, kwargs = _entered(call)
            outputs.append(_tensors(stage(*args, **kwargs)))
    same = all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    return "" if same else "a second run of its forward gives other values"


def _outside(
    model: nn.Module, stages: Mapping[str, nn.Module], seen: Mapping[str, _Seen], batch: Any, loss: Loss
) -> StageCost:
    """What is left of loss(model, batch) where every stage hands on what it returned before."""
    leaves: list[Tensor] = []

    def handed(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            def one(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                    return leaf
                leaves.append(leaf.detach().requires_grad_())
                return leaves[-1].view_as(leaf)

            return tree_map(one, seen[path].output)

        return forward

    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) is not None:
            held[storage._cdata] = storage
        return tensor

    last = list(stages)[-1]
    forwards, backwards = [], []
    for turn in range(ROUNDS + 1):
        before = {stage: vars(stage).get("forward") for stage in stages.values()}
        for path, stage in stages.items():
            stage.forward = handed(path)
        try:
            leaves.clear()
            live = LiveBytes()
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)
            if not turn:  # for bytes; the others are for seconds
                live.__enter__()  # type: ignore[no-untyped-call]
                hooks.__enter__()
            live.mark()
            began = time.perf_counter()
            try:
                value = loss(model, batch)
            finally:
                if not turn:
                    hooks.__exit__(None, None, None)
            _finish([value])
            forwards.append(time.perf_counter() - began)
            if not turn:
                forward_bytes = live.added_bytes
                for tensor in (*leaves, *_tensors(batch), *model.parameters(), *model.buffers()):
                    if (storage := storage_of(tensor)) is not None:
                        held.pop(storage._cdata, None)
                saved_bytes = sum(storage.nbytes() for storage in held.values())
                held.clear()
                live.mark()
            began = time.perf_counter()
            value.backward()
            _finish([value])
            backwards.append(time.perf_counter() - began)
            if not turn:
                backward_bytes = live.added_bytes
                live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            del value
        finally:
            for stage, own in before.items():
                if own is None:
                    del stage.forward
                else:
                    stage.forward = own
            _drop_gradients(model)
    return StageCost(
        path="",
        forward_seconds=min(forwards[1:]),
        backward_seconds=min(backwards[1:]),
        input_bytes=sum(one.nbytes for one in _tensors(seen[last].output)),
        saved_bytes=saved_bytes,
        forward_extra_bytes=max(0, forward_bytes - saved_bytes),
        backward_extra_bytes=backward_bytes,
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _ones(output: Any) -> list[Tensor]:
    return [torch.ones_like(one) for one in _tensors(output) if one.requires_grad]


def _backward(output: Any, grads: list[Tensor]) -> None:
    roots = [one for one in _tensors(output) if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, grads)


def _drop_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _finish(tree: Any) -> None:
    """Waits for what a device still has to do."""
    for one in _tensors(tree):
        if one.device.type == "cuda":
            torch.cuda.synchronize(one.device)
