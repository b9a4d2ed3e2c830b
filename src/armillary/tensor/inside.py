"""A region while it runs: its modules keep their classes, names and hooks, and their forward goes through here.

Functions are met by a TorchFunctionMode, so the model's own code may call attention, dropout and parameters as it
likes.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
    if at.is_last:
        first = region.left(first)
    return (first, *y[1:]) if isinstance(y, tuple) else first


class _Inside(TorchFunctionMode):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, way = kwargs or {}, self.region.way
        if func is functional.scaled_dot_product_attention:
            call = AttentionCall(*args, **kwargs)
            return self._tagged(attend(self.region, func, call), (call.query,))
        if way.features and func in OVER_FEATURES:
            raise ValueError(
                f"tensor: {func.__name__} inside region {self.region.path!r} looks at all features, of which a rank "
                "has a piece; use nn.LayerNorm, nn.RMSNorm or nn.MultiheadAttention, or another way"
            )
        if way.tokens and (func.__name__ != "__get__" or func.__self__.__name__ in GIVES_TENSORS):
            args = tuple(self._summed(one) for one in args)
            kwargs = {name: self._summed(one) for name, one in kwargs.items()}
        if func in DROPOUTS and self._draws(*args, **kwargs):
            x = args[0] if args else kwargs["input"]
            with self.region.seeded(x.device, is_whole=not (way.cuts_activations or is_cut(x))):
                return self._tagged(func(*args, **kwargs), args)
        return self._tagged(func(*args, **kwargs), args)

    def _draws(self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **more: Any) -> bool:
        return training and p != 0.0

    def _summed(self, one: Any) -> Any:
        if isinstance(one, nn.Parameter) and one.requires_grad:
            return sum_backward(one, self.region.tensor_axes)
        return one

    def _tagged(self, out: Any, args: tuple[Any, ...]) -> Any:
        """What is made of a cut activation is cut, until a row linear sums it."""
        way = self.region.way
        if way.linears and not way.cuts_activations and any(is_cut(one) for one in _tensors(args)):
            for one in _tensors((out,)):
                marked_cut(one)
        return out


def _tensors(found: Any) -> Iterator[Tensor]:
    for one in found:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)


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
