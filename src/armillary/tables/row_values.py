"""Values computed from the rows of a table, one for each of its elements, and what they add up to over all ranks.

`p.norm()`, `(p ** 2).sum()`, `p.abs().max()`, `torch.isfinite(p).all()`, `torch.histc(p)` of a `TableHandle` end here.
A rank computes on the rows it holds. A reduction is a collective: every rank tells the others one small part (a sum,
an extreme, a histogram), and all of them join the parts in rank order, so they get the same bits.

Nothing here is differentiable. The exact gradient of a penalty reaches every row of the table, which no exchange by row
carries; the optimizer's weight_decay does, on each owner's rows. A backward through a result is refused by name.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.exchanges.all_reduce import all_reduce
from armillary.tables.table import METADATA

__all__ = ["RowSource", "RowValues", "as_ddp", "reads_rows"]


class RowSource(Protocol):
    """What is asked of the table behind them. rows: those held here, (local rows, *row shape)."""

    name: str
    shape: torch.Size

    @property
    def rows(self) -> Tensor: ...

    def everyones(self, part: Tensor) -> Tensor:
        """Collective: every rank's part, (parts, *part.shape); one alone where every rank holds the whole table."""


class RowValues(Tensor):
    """Of the table's shape and without storage. local: those of the rows held here. learns: whether one process could
    send a gradient through them."""

    source: RowSource
    local: Tensor
    learns: bool

    @staticmethod
    def __new__(cls, source: RowSource, local: Tensor, learns: bool) -> "RowValues":
        values: RowValues = Tensor._make_wrapper_subclass(cls, source.shape, dtype=local.dtype, device=local.device)
        values.source, values.local, values.learns = source, local, learns and local.is_floating_point()
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowValues({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = dict(kwargs or {}), _name(func)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "_foreach_norm":
            return [torch.linalg.vector_norm(one, *args[1:], **kwargs) for one in args[0]]
        if name in _ELEMENTWISE:
            return _computed(func, name, args, kwargs)
        if name in _REDUCTIONS and isinstance(args[0], RowValues):
            return _reduced(args[0], name, args[1:], kwargs)
        raise _refusal(_first(args), name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _refusal(_first(args), str(func))


def reads_rows(func: Callable[..., Any]) -> bool:
    """Whether the function is one of an element each, or a reduction of all of them."""
    name = _name(func)
    return name in _ELEMENTWISE or name in _REDUCTIONS or name == "_foreach_norm"


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _first(args: Sequence[Any]) -> str:
    """The table of the first of them that has one."""
    found = [one.source.name for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])
             if isinstance(one, RowValues)]  # fmt: skip
    return found[0] if found else "a row-sharded table"


def _refusal(name: str, operation: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: {operation} needs the whole table, whose rows are spread over the workers; of these values there are "
        f"{', '.join(_REDUCTIONS)}, over all elements at once. Remedy: run.export() gives whole weights on rank 0; "
        f"run.ema(decay) averages them; {as_ddp(name)}, for a momentum encoder too"
    )


def _computed(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowValues:
    """Of rows of one table and of numbers."""
    tables = [one for one in (*args, *kwargs.values()) if isinstance(one, RowValues)]
    values = tables[0]
    others = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and not isinstance(one, RowValues)]
    if any(one.source is not values.source for one in tables) or any(one.dim() for one in others):
        raise _refusal(values.source.name, f"{name} with another tensor")
    mine = [one.local if isinstance(one, RowValues) else one for one in args]
    named = {key: one.local if isinstance(one, RowValues) else one for key, one in kwargs.items()}
    learns = torch.is_grad_enabled() and name != "detach" and any(one.learns for one in tables)
    with torch.no_grad():
        return RowValues(values.source, func(*mine, **named), learns)


def _reduced(values: RowValues, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    reduction = _REDUCTIONS[name]
    said = {key: value for key, value in kwargs.items() if value is not None and (key, value) != ("keepdim", False)}
    try:
        asked = inspect.signature(reduction).bind(values, *args, **said)
    except TypeError as error:  # over one dimension, for one
        with_what = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in said.items())])
        raise _refusal(values.source.name, f"{name} with {with_what}") from error
    with torch.no_grad():
        found = reduction(*asked.args, **asked.kwargs)
    is_number = isinstance(found, Tensor) and found.is_floating_point()
    if not is_number or not values.learns or not torch.is_grad_enabled():
        return found
    found = found.requires_grad_()
    found.register_hook(partial(_refuse_gradient, values.source.name, name))
    return found.clone()


def as_ddp(table: str) -> str:
    """The remedy for a table that cannot be read by row. 'replicated' would not do: a whole copy whose gradient travels
    by row is read by row, too."""
    return f"constraints={{{table!r}: {all_reduce.__name__!r}}} keeps it whole and plain, as DDP does"


def _refuse_gradient(name: str, operation: str, gradient: Tensor) -> None:
    raise NotImplementedError(
        f"{name}: {operation} cannot be part of the loss: its gradient reaches every row of a table whose rows are "
        "spread over the workers. Remedy: weight_decay=c of SGD or Adam, in a param group of its own, is the gradient "
        f"of c / 2 * (p ** 2).sum(); or {as_ddp(name)}"
    )


def _joined(values: RowValues, *numbers: Tensor | float) -> Tensor:
    """Collective: numbers of the rows held here, as float64: (parts, how many)."""
    part = torch.stack([torch.as_tensor(number).double().cpu() for number in numbers])
    return values.source.everyones(part)


def _like(values: RowValues, found: Tensor) -> Tensor:
    return found.to(values.local.device, values.local.dtype)


def _total(values: RowValues, *, dtype: torch.dtype | None = None) -> Tensor:
    floats = values.dtype.is_floating_point
    local = values.local.sum(dtype=torch.float64 if floats else torch.int64)
    total = _joined(values, local).sum(0)[0]
    return total.to(values.local.device, dtype or (values.dtype if floats else torch.int64))


def _mean(values: RowValues) -> Tensor:
    if not values.dtype.is_floating_point:
        raise TypeError(f"{values.source.name}: mean of {values.dtype}; want a floating dtype, .float() gives one")
    return _like(values, _joined(values, values.local.sum(dtype=torch.float64)).sum(0)[0] / values.numel())


def _variance(values: RowValues, unbiased: bool = True, *, correction: int | None = None) -> Tensor:
    if not isinstance(unbiased, bool):
        raise _refusal(values.source.name, f"a variance over dim {unbiased}")
    less = int(unbiased) if correction is None else correction
    mean = _joined(values, values.local.sum(dtype=torch.float64)).sum(0)[0] / values.numel()
    apart = (values.local - mean.to(values.local.device)).square().sum(dtype=torch.float64)
    return _like(values, _joined(values, apart).sum(0)[0] / max(0, values.numel() - less))


def _deviation(values: RowValues, unbiased: bool = True, *, correction: int | None = None) -> Tensor:
    return _variance(values, unbiased, correction=correction).sqrt()


def _largest(values: RowValues) -> Tensor:
    return _like(values, _extremes(values)[1])


def _smallest(values: RowValues) -> Tensor:
    return _like(values, _extremes(values)[0])


class _Extremes(NamedTuple):
    min: Tensor
    max: Tensor


def _extremes(values: RowValues) -> _Extremes:
    """NaN if any is, as in torch; a rank that holds no row has none."""
    local = values.local
    low, high = local.aminmax() if local.numel() else (math.inf, -math.inf)
    parts = _joined(values, low, high)
    return _Extremes(parts[:, 0].amin(), parts[:, 1].amax())


def _every(values: RowValues) -> Tensor:
    return _joined(values, values.local.all()).all().to(values.local.device)


def _some(values: RowValues) -> Tensor:
    return _joined(values, values.local.any()).any().to(values.local.device)


def _nonzero(values: RowValues) -> Tensor:
    return _joined(values, torch.count_nonzero(values.local)).sum(0)[0].to(values.local.device, torch.int64)


def _norm(values: RowValues, ord: Any = 2) -> Tensor:
    """Of all elements as one vector, of any order."""
    if isinstance(ord, str) and ord not in ("fro", "inf", "-inf"):
        raise _refusal(values.source.name, f"a norm of order {ord!r}")
    order = 2.0 if ord == "fro" else float(ord)
    if not math.isfinite(order):
        low, high = _extremes(RowValues(values.source, values.local.abs(), False))
        found = high if order > 0 else low
    elif order == 0:
        found = _nonzero(values)
    else:
        norm = torch.linalg.vector_norm
        powers = norm(values.local, order, dtype=torch.float64) ** order if len(values.local) else 0.0
        found = _joined(values, powers).sum(0)[0] ** (1.0 / order)
    return _like(values, found)


def _tensor_norm(values: RowValues, p: Any = "fro") -> Tensor:
    return _norm(values, p)


def _matrix_norm(values: RowValues, ord: Any = "fro") -> Tensor:
    """torch.linalg.norm of a matrix: the others of its orders are no sums over elements."""
    if ord != "fro" and values.dim() != 1:
        raise _refusal(values.source.name, f"linalg.norm of order {ord} (torch.linalg.vector_norm takes any)")
    return _norm(values, ord)


class _Histogram(NamedTuple):
    hist: Tensor
    bin_edges: Tensor


def _range(values: RowValues, low: float, high: float) -> tuple[float, float]:
    """That asked for, or that of the elements; one of no width is widened as torch does."""
    if low == high:
        low, high = (float(one) for one in _extremes(values))
    if not math.isfinite(low) or not math.isfinite(high):
        raise RuntimeError(f"{values.source.name}: a histogram from {low} to {high}; give it a finite range")
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _countable(values: RowValues) -> Tensor:
    """torch counts these only."""
    return values.local if values.dtype in (torch.float32, torch.float64) else values.local.float()


def _histc(values: RowValues, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    mine = torch.histc(_countable(values), bins, *_range(values, min, max))
    return _like(values, values.source.everyones(mine.double().cpu()).sum(0))


def _histogram(values: RowValues, bins: int, *, range: tuple[float, float] = (0.0, 0.0)) -> _Histogram:
    mine = torch.histogram(_countable(values).cpu(), bins, range=_range(values, *range))
    found = values.source.everyones(mine.hist.double()).sum(0)
    return _Histogram(_like(values, found), _like(values, mine.bin_edges))


_ELEMENTWISE = {
    *("abs", "absolute", "neg", "square", "pow", "sqrt", "exp", "log", "sign", "clamp", "clip", "nan_to_num"),
    *("mul", "multiply", "div", "true_divide", "rdiv", "add", "radd", "sub", "rsub"),
    *("gt", "ge", "lt", "le", "eq", "ne", "isfinite", "isnan", "isinf", "invert", "logical_not"),
    *("float", "double", "half", "bfloat16", "to", "cpu", "detach"),
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "norm": _tensor_norm, "linalg_vector_norm": _norm, "linalg_norm": _matrix_norm, "sum": _total, "mean": _mean,
    "std": _deviation, "var": _variance, "max": _largest, "min": _smallest, "amax": _largest, "amin": _smallest,
    "all": _every, "any": _some, "count_nonzero": _nonzero, "histc": _histc,
    "histogram": _histogram,
}  # fmt: skip
