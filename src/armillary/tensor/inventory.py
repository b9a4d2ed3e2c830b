"""What a region is made of and costs on this rank: shapes, seconds and bytes of a few samples, from passes of the plain
model. Nothing is trained: gradients, buffers and random state stay as they were."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

__all__ = ["Inventory", "LinearSeen", "looked_at", "samples_of", "share_of", "slowest"]

Loss = Callable[[nn.Module, Any], Tensor]
STEPS = 5  # timed; a fixed number, so that ranks make the same passes
UPDATED_NUMBERS = 1 << 20
CUT = (functional.linear, functional.scaled_dot_product_attention, functional.multi_head_attention_forward)


@dataclass(frozen=True)
class LinearSeen:
    """One linear layer. reads_anew: no layer before it read the same tensor."""

    path: str
    inputs: int
    outputs: int
    has_bias: bool
    reads_anew: bool


@dataclass(frozen=True)
class Inventory:
    """Of one region, and of what is around it, by `samples` samples; in JSON as it is.

    Args of note:
        tokens: of one sample, 1 where the activation has none. width: of the activation between blocks.
        norms: path -> (sums a row each way and step, parameters). attentions: how many calls. heads: what
            divides the heads of all of them.
        cut_share: of the region's seconds, what linear layers and attention take.
        whole_bytes, inner_bytes: kept for backward in the region: of the shape between blocks, and others.
    """

    samples: int
    tokens: int
    width: int
    number_bytes: int
    blocks: int
    linears: tuple[LinearSeen, ...] = ()
    norms: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    attentions: int = 0
    heads: int = 0
    region_numbers: tuple[int, ...] = ()
    outside_numbers: int = 0
    region_seconds: float = 0.0
    outside_seconds: float = 0.0
    cut_share: float = 1.0
    update_seconds: float = 0.0
    whole_bytes: int = 0
    inner_bytes: int = 0
    outside_bytes: int = 0


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


def share_of(batch: Any, begin: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda one: one[begin:end] if one.dim() else one, batch)


def looked_at(
    model: nn.Module,
    chain: Mapping[str, nn.Module],
    batch: Any,
    loss: Loss,
    rows_dim: int,
) -> Inventory:
    """batch: as many samples as are to be looked at. All ranks at once, as they will train."""
    with _untouched(model):
        watch = _Watch(model, chain)
        with watch.hooked():
            kept_around = _kept(model, lambda: loss(model, batch))
        trainable = [one for one in model.parameters() if one.requires_grad]
        calls = [(module, *watch.calls[path]) for path, module in chain.items()]
        first = calls[0][1][0]
        kept_inside, whole = _kept_in(model, calls, first.shape)
        step = _median(lambda: torch.autograd.grad(loss(model, batch), trainable, allow_unused=True))
        region = _median(lambda: _play(calls))
        share = _cut_share(calls)
    inside = {one for module in chain.values() for one in module.parameters()}
    return Inventory(
        samples=samples_of(batch),
        tokens=first.shape[1 - rows_dim] if first.dim() > 2 else 1,
        width=first.shape[-1],
        number_bytes=first.element_size(),
        blocks=len(chain),
        linears=tuple(watch.linears),
        norms=watch.norms,
        attentions=watch.attentions,
        heads=watch.heads,
        region_numbers=tuple(one.numel() for one in inside),
        outside_numbers=sum(one.numel() for one in model.parameters() if one not in inside),
        region_seconds=region,
        outside_seconds=max(step - region, 0.0),
        cut_share=share,
        update_seconds=_update_seconds(),
        whole_bytes=whole,
        inner_bytes=kept_inside - whole,
        outside_bytes=max(kept_around - kept_inside, 0),
    )


def slowest(seen: Sequence[Inventory]) -> Inventory:
    """Rank 0's, with the seconds of the rank that took longest."""
    names = ("region_seconds", "outside_seconds", "update_seconds")
    return replace(seen[0], **{name: max(getattr(one, name) for one in seen) for name in names})


class _Watch:
    """Notes calls of the chain's modules, and what is in them, in the order of the forward."""

    def __init__(self, model: nn.Module, chain: Mapping[str, nn.Module]) -> None:
        self.calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]()
        self.linears, self.norms, self.attentions = list[LinearSeen](), dict[str, tuple[int, int]](), 0
        self.heads = 0
        self._chain = chain
        self._last: Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for path, module in self._chain.items():
            handles.append(module.register_forward_pre_hook(self._called(path), with_kwargs=True))
            for name, one in module.named_modules():
                at = f"{path}.{name}" if name else path
                handles.append(one.register_forward_pre_hook(self._seen(at)))
        try:
            with _Attentions(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[path] = tree_map_only(Tensor, lambda one: one.detach(), (args, kwargs))

        return note

    def _seen(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, nn.Linear):
                self._linear(path, module.in_features, module.out_features, module.bias is not None, args[0])
            elif isinstance(module, nn.MultiheadAttention):
                wide = module.embed_dim
                self._linear(f"{path}.in_proj", wide, 3 * wide, module.in_proj_bias is not None, args[0])
                self._linear(f"{path}.out_proj", wide, wide, module.out_proj.bias is not None, None)
                self.attend(module.num_heads)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                sums = 4 if isinstance(module, nn.LayerNorm) else 2
                self.norms[path] = (sums, len(list(module.parameters())))

        return note

    def attend(self, heads: int) -> None:
        self.attentions, self.heads = self.attentions + 1, math.gcd(self.heads, heads)

    def _linear(self, path: str, inputs: int, outputs: int, has_bias: bool, x: Tensor | None) -> None:
        self.linears.append(LinearSeen(path, inputs, outputs, has_bias, x is None or x is not self._last))
        self._last = x


class _Attentions(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.watch.attend((args[1] if len(args) > 1 else kwargs["key"]).shape[-3])
        return func(*args, **(kwargs or {}))


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


def _cut_share(calls: list[Any]) -> float:
    began, clock = time.perf_counter(), _Clock()
    with clock, torch.no_grad():
        for module, args, kwargs in calls:
            module(*args, **kwargs)
    return min(1.0, clock.seconds / (time.perf_counter() - began))


def _play(calls: list[Any]) -> None:
    """Forward and backward of each module alone."""
    for module, (x, *args), kwargs in calls:
        x = x.detach().requires_grad_(x.is_floating_point())
        y = module(x, *args, **kwargs)
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


def _kept(model: nn.Module, forward: Callable[[], Any], shape: torch.Size | None = None) -> int:
    """Bytes that autograd keeps of a forward, without parameters; of one shape, if one is given."""
    seen = {one.untyped_storage()._cdata for one in model.parameters()}
    found = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal found
        storage = x.untyped_storage()
        if storage._cdata not in seen and (shape is None or x.shape == shape):
            seen.add(storage._cdata)
            found += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.enable_grad():
        held = forward()
    del held
    return found


def _kept_in(model: nn.Module, calls: list[Any], shape: torch.Size) -> tuple[int, int]:
    """In the region: all, and what has the shape of the activation between blocks."""

    def forward() -> list[Any]:
        return [module(x.detach().requires_grad_(), *args, **kwargs) for module, (x, *args), kwargs in calls]

    return _kept(model, forward), _kept(model, forward, shape)


def _update_seconds() -> float:
    """Of an AdamW step, a number."""
    parameter = nn.Parameter(torch.zeros(UPDATED_NUMBERS))
    parameter.grad = torch.ones(UPDATED_NUMBERS)
    return _median(torch.optim.AdamW([parameter]).step) / UPDATED_NUMBERS


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, one in model.named_buffers():
                    one.copy_(buffers[name])
