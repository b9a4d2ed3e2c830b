"""A region of a model while it runs: where its activation is cut and joined, and what functions mean inside.

Each module of the region's chain gets a subclass of its own class, as torch's fully_shard does: names, hooks and the
loop of the model stay. Functions are met by a TorchFunctionMode, so the model's own code may call attention, dropout
and parameters as it likes.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from armillary.tensor.attention import AttentionCall, attend, padded
from armillary.tensor.collectives import SumBackward, applied
from armillary.tensor.dropout import base_seed, seeded
from armillary.tensor.groups import MeshAxis, TensorMesh
from armillary.tensor.linear import is_cut, marked_cut
from armillary.tensor.ways import CutWay

__all__ = ["Region", "enter_region"]

DROPOUTS = {
    functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
    functional.dropout2d, functional.dropout3d,
}  # fmt: skip
OVER_FEATURES = {
    functional.layer_norm, functional.rms_norm, functional.group_norm, functional.normalize,
    functional.multi_head_attention_forward,
}  # fmt: skip
GIVES_TENSORS = ("T", "mT", "H", "mH", "data", "real")
ALIKE = 1e-4  # of two sums of one activation, relative to its size: other samples differ by more


class Region:
    """One region of one model. samples, tokens: of the whole activation that came last; tokens 0 where it has none."""

    def __init__(self, path: str, way: CutWay, mesh: TensorMesh, rows_dim: int, draws: bool) -> None:
        self.path, self.way, self.mesh, self.draws = path, way, mesh, draws
        self.rows_dim, self.tokens_dim = rows_dim, 1 - rows_dim
        self.samples = self.tokens = 0
        self._is_compared = self._is_stream_compared = False
        self._copied: tuple[Tensor, int, Tensor] | None = None

    @property
    def tensor_axes(self) -> list[MeshAxis]:
        return self.mesh.over(self.way.axes)

    def entered(self, x: Tensor) -> Tensor:
        """(samples, tokens, features), whole -> this rank's piece."""
        self._compare(x)
        self.samples = x.shape[self.rows_dim]
        self.tokens = x.shape[self.tokens_dim] if x.dim() > 2 else 0
        lacking = f"want at least {{}} a replica in region {self.path!r}, one for each rank that cuts them, got {{}}"
        if self.samples < (many := self.mesh.pieces(self.way.rows)):
            raise ValueError(f"tensor: {lacking.format(f'{many} samples', self.samples)}; take larger batches")
        if self.way.tokens and self.tokens < (many := self.mesh.pieces(self.way.tokens)):
            raise ValueError(f"tensor: {lacking.format(f'{many} tokens', self.tokens)}; take longer sequences")
        if not self.way.cuts_activations:
            return x
        return applied(_Enter, x, self)

    def left(self, x: Tensor) -> Tensor:
        if not self.way.cuts_activations:
            return x
        return applied(_Leave, x, self, self.samples, self.tokens)

    def cut(self, x: Tensor, is_gradient: bool = False) -> Tensor:
        """What pads a gradient is nothing."""
        for names, dim in self._cuts():
            pieces = self.mesh.pieces(names)
            if dim != -1:
                x = padded(x, dim, -(-x.shape[dim] // pieces) * pieces, is_gradient)
            x = self.mesh.piece(x, names, dim)
        return x.contiguous()

    def joined(self, x: Tensor, samples: int, tokens: int) -> Tensor:
        for names, dim in reversed(self._cuts()):
            x = self.mesh.joined(x, names, dim)
        x = x.narrow(self.rows_dim, 0, samples)
        return x.narrow(self.tokens_dim, 0, tokens) if self.way.tokens else x

    def _cuts(self) -> list[tuple[tuple[str, ...], int]]:
        found = [(self.way.rows, self.rows_dim), (self.way.tokens, self.tokens_dim), (self.way.features, -1)]
        return [(names, dim) for names, dim in found if names]

    def copied(self, x: Tensor) -> Tensor:
        """The input of column linears; those that read one tensor share the sum of its gradient."""
        if self._copied is not None and self._copied[0] is x and self._copied[1] == x._version:
            return self._copied[2]
        found: Tensor = applied(SumBackward, x, self.tensor_axes)
        if torch.is_grad_enabled():
            self._copied = (x, x._version, found)
        return found

    def seeded(self, device: torch.device, is_whole: bool) -> AbstractContextManager[None]:
        """For what draws on a piece, or on an activation that all ranks of a replica hold alike."""
        base = base_seed()
        if not self._is_stream_compared:
            self._is_stream_compared = True
            self._refuse_apart(float(base % (1 << 50)), 0.0, "random streams")
        piece = self.mesh.piece_index(("data", *(() if is_whole else self.way.axes)))
        return seeded(base, piece, device)

    def run(self, forward: Callable[..., Any], at: "Place", x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One module of the chain."""
        if at.is_first:
            x = self.entered(x)
        try:
            with _Inside(self):
                y = forward(x, *args, **kwargs)
        except RuntimeError as error:
            if any(word in str(error) for word in ("shape", "size", "dimension")):
                raise RuntimeError(f"tensor: {_culprit(error, at)}: {error}{ADVICE}") from error
            raise
        finally:
            self._copied = None
        first = y[0] if isinstance(y, tuple) else y
        if not isinstance(first, Tensor) or first.shape != x.shape or (not self.way.features and is_cut(first)):
            got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise ValueError(
                f"tensor: {at.path} made {got} of a piece {tuple(x.shape)}; want modules in region {self.path!r} that "
                "keep the shape, with a row linear behind each column linear (give roles=...)"
            )
        if at.is_last:
            first = self.left(first)
        return (first, *y[1:]) if isinstance(y, tuple) else first

    def _compare(self, x: Tensor) -> None:
        """Once: ranks of a replica must be given the same samples."""
        if self._is_compared or not self.way.axes:
            return
        self._is_compared = True
        x = x.detach().double()
        self._refuse_apart(float(x.sum()), ALIKE * float(x.abs().sum()), "batches")
        if self.draws:
            state = torch.get_rng_state().double()
            self._refuse_apart(float(state @ torch.arange(len(state)).double()), 0.0, "random streams")

    def _refuse_apart(self, number: float, by: float, what: str) -> None:
        """Every rank of the replica finds the same, whichever axes they differ along."""
        low = high = number
        for axis in self.tensor_axes:
            lows, highs, allowed = zip(*axis.everyones([low, high, by]), strict=True)
            low, high, by = min(lows), max(highs), max(allowed)
        if high - low > by:
            raise ValueError(
                f"tensor: ranks of one replica have different {what}; choose data and seeds by part.data_rank of "
                "part.replicas, not by the rank of the job"
            )


ADVICE = (
    "\nInside a region a rank has fewer heads, samples or tokens than the whole model: leave the number of heads free, "
    "as in x.unflatten(-1, (-1, head_width)), and take sizes from the tensors"
)


class Place:
    """Of one module in its region's chain."""

    def __init__(self, path: str, is_first: bool, is_last: bool, model: nn.Module) -> None:
        self.path, self.is_first, self.is_last, self.model = path, is_first, is_last, weakref.ref(model)


def enter_region(region: Region, model: nn.Module, chain: Mapping[str, nn.Module]) -> None:
    """From now on the modules of the chain run inside the region."""
    for number, (path, module) in enumerate(chain.items()):
        place = Place(path, number == 0, number == len(chain) - 1, model)
        kind = type(module)
        module.__class__ = type(f"Cut{kind.__name__}", (_InRegion, kind), {})
        module._armillary = (region, place)  # type: ignore[assignment]


class _InRegion:
    """Before the class of a module."""

    _armillary: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region, place = self._armillary
        return region.run(super().forward, place, *args, **kwargs)  # type: ignore[misc]


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
        if func in DROPOUTS and self._draws(args, kwargs):
            x = args[0] if args else kwargs["input"]
            with self.region.seeded(x.device, is_whole=not (way.cuts_activations or is_cut(x))):
                return self._tagged(func(*args, **kwargs), args)
        return self._tagged(func(*args, **kwargs), args)

    def _draws(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        p, training = (*args[1:], *(None, None))[:2]
        p, training = kwargs.get("p", p), kwargs.get("training", training)
        return training is not False and p != 0.0

    def _summed(self, one: Any) -> Any:
        if isinstance(one, nn.Parameter) and one.requires_grad:
            return applied(SumBackward, one, self.region.tensor_axes)
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


def _culprit(error: BaseException, at: Place) -> str:
    """The innermost module of the model's own in whose forward it arose."""
    found, frame, model = at.path, error.__traceback__, at.model()
    names = {} if model is None else {module: path for path, module in model.named_modules()}
    while frame is not None:
        inside = frame.tb_frame.f_locals.get("self")
        if isinstance(inside, nn.Module) and inside in names:
            found = names[inside]
        frame = frame.tb_next
    return found


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region, ctx.tokens = region, x.shape[region.tokens_dim] if x.dim() > 2 else 0
        ctx.samples = x.shape[region.rows_dim]
        return region.cut(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.region.joined(dy, ctx.samples, ctx.tokens), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, samples: int, tokens: int) -> Tensor:
        ctx.region = region
        return region.joined(x, samples, tokens)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        region: Region = ctx.region
        return region.cut(dy, is_gradient=True), None, None, None
