"""The gradient of a row-sharded table as everyone but the optimizer's step sees it.

Norms are global (one small all-reduce for all tables, so every rank must ask for them), and scaling acts on the rows
owned here. It stands both in `handle.grad` (global shape) and in `.grad` of the parameter that the optimizer holds
(local shape). So clipping over `model.parameters()` and over `optimizer.param_groups` give the same, one-process
result. Only inside the optimizer's step is the plain tensor there.

While gradients accumulate they wait in the look-ups of this rank (`tables/table.py`). Then `handle.grad` is there and
can be dropped, and nothing else can be asked of it.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["METADATA", "GradientHandle", "NormSource"]

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_sparse", "is_cuda", "is_meta",
    "grad_fn", "is_quantized", "nbytes", "itemsize", "_version",
)  # fmt: skip

METADATA: set[Any] = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.ndimension, Tensor.__len__,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, Tensor.is_contiguous,
    Tensor.stride, Tensor.__hash__, Tensor.requires_grad_, Tensor.is_inference, torch.numel,
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad",)),
}  # fmt: skip

_ITSELF = {Tensor.detach, Tensor.detach_, Tensor.data.__get__}  # type: ignore[attr-defined]
_ELEMENTWISE = {"mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_"}
_ELEMENTWISE |= {f"_foreach_{name}" for name in _ELEMENTWISE}
_ELEMENTWISE.add("_amp_foreach_non_finite_check_and_unscale_")


class NormSource(Protocol):
    """What the gradient needs of the table behind it.

    epoch: gradients it has had. join: adds to `gradient` what is under way for the same step.
    """

    name: str
    epoch: int

    @property
    def gradient(self) -> Tensor | None: ...

    def join(self) -> None: ...

    def gradient_norms(self, order: float) -> Tensor: ...

    def drop_accumulated(self) -> None: ...


class GradientHandle(Tensor):
    """kept: gradient of the rows (or of the window) that this rank's optimizer holds; None while it accumulates, when
    the handle is seen for a moment.

    The table is known weakly: it holds the parameter whose `.grad` this is, a circle that no collector sees.
    """

    kept: Tensor | None
    _known: "weakref.ref[NormSource]"
    _epoch: int

    @staticmethod
    def __new__(cls, table: NormSource, like: Tensor, local: Tensor | None) -> "GradientHandle":
        gradient: GradientHandle = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        gradient._known, gradient._epoch, gradient.kept = weakref.ref(table), table.epoch, local
        return gradient

    @property
    def table(self) -> NormSource:
        """
        Raises:
            RuntimeError: it is gone.
        """
        table = self._known()
        if table is None:
            raise RuntimeError("the table of this gradient is gone; keep its model as long as you look at gradients")
        return table

    @property
    def local(self) -> Tensor | None:
        """The whole of `kept`. Until a step has taken it, that is the table's gradient, whatever has been added."""
        table = self._known()
        if self.kept is None or table is None or table.epoch != self._epoch or table.gradient is None:
            return self.kept
        table.join()
        assert table.gradient is not None
        return table.gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientHandle({self.table.name!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if accumulating := _accumulating(args):
            return _dropped(accumulating, name, args)
        if func in _ITSELF:
            return args[0]
        if name == "_foreach_norm":
            return [torch.linalg.vector_norm(gradient, *args[1:], **kwargs) for gradient in args[0]]
        if name in ("vector_norm", "linalg_vector_norm", "norm"):
            return _norm(*args, **kwargs)
        if name in _ELEMENTWISE:
            func(*(_local(arg) for arg in args), **kwargs)
            return args[0]
        raise _refusal(args[0], name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if accumulating := _accumulating(args):
            return _dropped(accumulating, str(func), args)
        raise _refusal(args[0] if args else None, str(func))


def _refusal(gradient: Any, operation: str) -> NotImplementedError:
    owner = gradient.table.name if isinstance(gradient, GradientHandle) else "a row-sharded table"
    return NotImplementedError(
        f"{owner}.grad: {operation} would need the whole gradient, whose rows are spread over the workers; norms, "
        "mul_, div_, clamp_ and zero_ work (clip_grad_norm_, clip_grad_value_). If an optimizer asks that was made "
        "since the run began: the run steps only those it was given; call run.close(), then attach the new one"
    )


def _flat(args: Any) -> list[Any]:
    return [one for arg in args for one in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def _accumulating(args: Any) -> list[GradientHandle]:
    return [one for one in _flat(args) if isinstance(one, GradientHandle) and one.kept is None]


def _dropped(accumulating: Sequence[GradientHandle], name: str, args: Sequence[Any]) -> Any:
    """What waits in look-ups can be dropped, and nothing else."""
    if name not in ("zero_", "_foreach_zero_"):
        raise RuntimeError(
            f"{', '.join(one.table.name for one in accumulating)}: {name} of a gradient that accumulates on this rank "
            "and was not exchanged (run.no_sync); ask after the backward outside it, or set it to None"
        )
    for one in accumulating:
        one.table.drop_accumulated()
    known = {id(one) for one in accumulating}
    if others := [one for one in _flat(args) if id(one) not in known]:
        torch._foreach_zero_(others)
    return args[0]


def _local(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_local(one) for one in arg]
    return arg.local if isinstance(arg, GradientHandle) else arg


def _norm(gradient: GradientHandle, ord: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    order = kwargs.get("p", ord)
    order = 2.0 if order in (None, "fro") else float(order)
    if dim is not None or order <= 0:
        raise _refusal(gradient, f"norm of order {order} over dim {dim}")
    gradient.table.join()
    return gradient.table.gradient_norms(order)
