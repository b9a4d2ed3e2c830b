"""A region while it runs: its modules keep their classes, names and hooks, and their forward goes through here.

Functions are met by a TorchFunctionMode, so the model's own code may call attention, dropout and parameters as it
likes.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from armillary.tensor.attention import AttentionCall, attend
from armillary.tensor.collectives import sum_backward
from armillary.tensor.linear import is_cut, marked_cut
from armillary.tensor.region import Region

__all__ = ["enter_region"]

DROPOUTS = {
    functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
    functional.dropout2d, functional.dropout3d,
}  # fmt: skip
OVER_FEATURES = {
    functional.layer_norm, functional.rms_norm, functional.group_norm, functional.normalize,
    functional.multi_head_attention_forward,
}  # fmt: skip
PIECE = "_armillary_is_piece"  # an attribute of what a module of the chain gives the others
GIVES_TENSORS = ("T", "mT", "H", "mH", "data", "real")
ADVICE = (
    "\nInside a region a rank has fewer heads, samples or tokens than the whole model: leave the number of heads free, "
    "as in x.unflatten(-1, (-1, head_width)), and take sizes from the tensors"
)


class Place(NamedTuple):
    """Of one module in its region's chain."""

    path: str
    is_first: bool
    is_last: bool


def enter_region(region: Region, chain: Mapping[str, nn.Module]) -> None:
    """From now on the modules of the chain run inside the region."""
    for number, (path, module) in enumerate(chain.items()):
        place = Place(path, number == 0, number == len(chain) - 1)
        module.forward = partial(_run, region, place, module.forward)


def _run(region: Region, at: Place, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if at.is_first:
        x = region.entered(x)
    if region.way.cuts_activations:
        args, kwargs = tree_map_only(Tensor, partial(_given_whole, region), (args, kwargs))
    try:
        with _Inside(region):
            y = forward(x, *args, **kwargs)
    except RuntimeError as error:
        if any(word in str(error) for word in ("shape", "size", "dimension")):
            raise RuntimeError(f"tensor: {_culprit(error, at.path, forward)}: {error}{ADVICE}") from error
        raise
    finally:
        region.forget_copied()
    first = y[0] if isinstance(y, tuple) else y
    if not isinstance(first, Tensor) or first.shape != x.shape or (not region.way.features and is_cut(first)):
        got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(
            f"tensor: {at.path} made {got} of a piece {tuple(x.shape)}; want modules in region {region.path!r} that "
            "keep the shape, with a row linear behind each column linear (give roles=...)"
        )
    for one in _tensors((y,)):
        setattr(one, PIECE, True)
    if at.is_last:
        first = region.left(first)
    return (first, *y[1:]) if isinstance(y, tuple) else first


def _given_whole(region: Region, one: Tensor) -> Tensor:
    """What comes from outside beside the activation: each rank uses it for its own piece."""
    return sum_backward(one, region.tensor_axes) if one.requires_grad and not getattr(one, PIECE, False) else one


class _Inside(TorchFunctionMode):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.is_learning, self.saves = torch.is_grad_enabled(), _saves()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, way = kwargs or {}, self.region.way
        if way.tokens and (func.__name__ != "__get__" or func.__self__.__name__ in GIVES_TENSORS):
            args, kwargs = tree_map_only(nn.Parameter, self._summed, (args, kwargs))
        elif way.linears and not way.cuts_activations and {*map(is_cut, _tensors((args, kwargs)))} == {False, True}:
            args, kwargs = tree_map_only(Tensor, self._summed, (args, kwargs))
        if func is functional.scaled_dot_product_attention:
            call = AttentionCall(*args, **kwargs)
            if call.dropout_p:
                self._refuse_checkpoint(draws=True)
            return self._tagged(attend(self.region, func, call), (call.query,))
        if way.features and func in OVER_FEATURES:
            raise ValueError(
                f"tensor: {func.__name__} inside region {self.region.path!r} looks at all features, of which a rank "
                "has a piece; use nn.LayerNorm, nn.RMSNorm or nn.MultiheadAttention, or another way"
            )
        if func in DROPOUTS and self._draws(*args, **kwargs):
            self._refuse_checkpoint(draws=True)
            x = args[0] if args else kwargs["input"]
            with self.region.seeded(x.device, is_whole=not (way.cuts_activations or is_cut(x))):
                return self._tagged(func(*args, **kwargs), args)
        return self._tagged(func(*args, **kwargs), args)

    def _draws(self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **more: Any) -> bool:
        return training and p != 0.0

    def _summed(self, one: Tensor) -> Tensor:
        """Whole, and used by each rank with a piece of its own."""
        if is_cut(one) or not one.requires_grad:
            return one
        self._refuse_checkpoint(draws=False)
        return sum_backward(one, self.region.tensor_axes)

    def _refuse_checkpoint(self, draws: bool) -> None:
        """
        Raises:
            ValueError: an activation checkpoint begins inside a module of the chain, whose second run, outside of here,
                would not do this.
        """
        saves = _saves() if draws else None
        is_inner = saves is not None and saves is not self.saves and "_checkpoint_hook" in saves.__qualname__
        if is_inner or (self.is_learning and not torch.is_grad_enabled() and _is_run_again()):
            raise ValueError(
                f"tensor: an activation checkpoint begins inside a module of region {self.region.path!r}, whose second "
                "run would draw and sum otherwise; checkpoint whole modules of the region"
            )

    def _tagged(self, out: Any, args: tuple[Any, ...]) -> Any:
        """What is made of a cut activation is cut, until a row linear sums it."""
        if self.region.way.linears and any(is_cut(one) for one in _tensors(args)):
            for one in _tensors((out,)):
                marked_cut(one)
        return out


def _tensors(found: Any) -> Iterator[Tensor]:
    for one in found:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)
        elif isinstance(one, dict):
            yield from _tensors(one.values())


def _saves() -> Any:
    """What packs tensors that autograd saves now; None where nothing does."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else top[0]


def _is_run_again() -> bool:
    """Whether a reentrant checkpoint runs the first time, without a graph."""
    first = CheckpointFunction.forward.__code__
    return any(frame.f_code is first for frame, _ in traceback.walk_stack(None))


def _culprit(error: BaseException, path: str, forward: Any) -> str:
    """The innermost module of the model's own in whose forward it arose."""
    top, frame, found = getattr(forward, "__self__", nn.Module()), error.__traceback__, path
    names = {module: f"{path}.{name}" if name else path for name, module in top.named_modules()}
    while frame is not None:
        inside = frame.tb_frame.f_locals.get("self")
        if isinstance(inside, nn.Module) and inside in names:
            found = names[inside]
        frame = frame.tb_next
    return found
