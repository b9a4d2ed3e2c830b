"""What a region costs on this rank: seconds and bytes of a few samples, from passes of the plain model. Nothing is
trained: gradients, buffers and random state stay as they were."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from armillary.models.preserved_state import untouched

__all__ = ["Call", "Inventory", "calls_of", "looked_at", "samples_of", "share_of", "slowest"]

Loss = Callable[[nn.Module, Any], Tensor]
STEPS = 5  # timed; a fixed number, so that ranks make the same passes
UPDATED_NUMBERS = 1 << 20
CUT = (functional.linear, functional.scaled_dot_product_attention, functional.multi_head_attention_forward)


@dataclass(frozen=True)
class Inventory:
    """Of one region, and of what is around it, by `samples` samples; in JSON as it is.

    Args of note:
        tokens: of one sample, 1 where the activation has none.
        cut_share: of the region's seconds, what linear layers and attention take.
        outside_bytes: kept for backward around the region.
    """

    samples: int
    tokens: int
    number_bytes: int
    blocks: int
    outside_numbers: int
    region_seconds: float
    outside_seconds: float
    cut_share: float
    update_seconds: float
    outside_bytes: int


class Call(NamedTuple):
    """Of one module of the region's chain."""

    activation: Tensor
    others: tuple[Any, ...]
    named: Mapping[str, Any]


def samples_of(batch: Any) -> int:
    """
    Raises:
        ValueError: no tensor in it has samples in dimension 0, or they differ.
    """
    sizes = set[int]()
    tree_map_only(Tensor, lambda one: sizes.add(len(one)) if one.dim() else None, batch)
    if len(sizes) != 1:
        raise ValueError(
            f"tensor.plan: want a batch of tensors whose first dimension are the samples of a whole step, got sizes "
            f"{sorted(sizes)}"
        )
    return sizes.pop()


def share_of(batch: Any, end: int) -> Any:
    """Its first samples."""
    return tree_map_only(Tensor, lambda one: one[:end] if one.dim() else one, batch)


def calls_of(
    chain: Mapping[str, nn.Module], forward: Callable[[], Any], kept: Callable[[Tensor], Tensor]
) -> list[Call]:
    """What a forward calls the chain's modules with. kept: what stands for each tensor."""
    found = dict[nn.Module, Call]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        (x, *others), named = tree_map_only(Tensor, lambda one: kept(one.detach()), (args, kwargs))
        found[module] = Call(x, tuple(others), named)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in chain.values()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return [found[module] for module in chain.values()]


def looked_at(model: nn.Module, chain: Mapping[str, nn.Module], batch: Any, loss: Loss, rows_dim: int) -> Inventory:
    """batch: as many samples as are to be looked at. All ranks at once, as they will train."""
    modules = list(chain.values())
    with untouched(model):
        calls = calls_of(chain, lambda: loss(model, batch), lambda one: one)
        there = [one for one in (*model.parameters(), *tree_leaves(batch)) if isinstance(one, Tensor)]
        kept_around = _kept(there, lambda: loss(model, batch))
        kept_inside = _kept(there, lambda: _forwards(modules, calls))
        trainable = [one for one in model.parameters() if one.requires_grad]
        step = _median(lambda: torch.autograd.grad(loss(model, batch), trainable, allow_unused=True))
        region = _median(lambda: _play(modules, calls))
        share = _cut_share(modules, calls)
    x = calls[0].activation
    inside = {one for module in modules for one in module.parameters()}
    return Inventory(
        samples=samples_of(batch),
        tokens=x.shape[1 - rows_dim] if x.dim() > 2 else 1,
        number_bytes=x.element_size(),
        blocks=len(modules),
        outside_numbers=sum(one.numel() for one in model.parameters() if one not in inside),
        region_seconds=region,
        outside_seconds=max(step - region, 0.0),
        cut_share=share,
        update_seconds=_update_seconds(),
        outside_bytes=max(kept_around - kept_inside - x.nbytes, 0),  # the region's output goes before its backward
    )


def slowest(seen: Sequence[Inventory]) -> Inventory:
    """Rank 0's, with the seconds of the rank that took longest."""
    names = ("region_seconds", "outside_seconds", "update_seconds")
    return replace(seen[0], **{name: max(getattr(one, name) for one in seen) for name in names})


class _Clock(TorchFunctionMode):
    """Seconds in linear layers and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        if func in CUT:
            self.seconds += time.perf_counter() - began
        return found


def _cut_share(modules: Sequence[nn.Module], calls: Sequence[Call]) -> float:
    began, clock = time.perf_counter(), _Clock()
    with clock, torch.no_grad():
        _forwards(modules, calls)
    return min(1.0, clock.seconds / (time.perf_counter() - began))


def _forwards(modules: Sequence[nn.Module], calls: Sequence[Call]) -> list[Any]:
    """Of each module alone."""
    found = []
    for module, call in zip(modules, calls, strict=True):
        x = call.activation.detach().requires_grad_(call.activation.is_floating_point())
        found.append((x, module(x, *call.others, **call.named)))
    return found


def _play(modules: Sequence[nn.Module], calls: Sequence[Call]) -> None:
    """Forward and backward of each module alone."""
    for module, call in zip(modules, calls, strict=True):
        ((x, y),) = _forwards([module], [call])
        y = y[0] if isinstance(y, tuple) else y
        wanted = [one for one in (x, *module.parameters()) if one.requires_grad]
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)


def _median(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(STEPS + 1):  # the first warms up
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _kept(there: Sequence[Tensor], forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps of a forward, without what is there anyway."""
    kept = {one.untyped_storage()._cdata: 0 for one in there}

    def pack(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage()._cdata, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.enable_grad():
        held = forward()
    del held
    return sum(kept.values())


def _update_seconds() -> float:
    """Of an AdamW step, a number."""
    parameter = nn.Parameter(torch.zeros(UPDATED_NUMBERS))
    parameter.grad = torch.ones(UPDATED_NUMBERS)
    return _median(torch.optim.AdamW([parameter]).step) / UPDATED_NUMBERS
