"""A table whose rows are exchanged by row: this rank's shard, look-ups that wait for gradients, its gradient.

The optimizer holds a plain `nn.Parameter` (so foreach and fused optimizers work). That is either the shard itself,
with a dense gradient: exact for every element-wise optimizer. Or it is a *window*: between backward and step it holds
the rows that got a gradient, and nothing outside a step; exact when the optimizer leaves rows without gradient alone,
lazy otherwise.

A `GradientHandle` is the gradient as everyone but the optimizer's step sees it. Norms are global (one small all-reduce
for all tables, so every rank must ask for them), and scaling acts on the rows owned here. It stands both in
`handle.grad` (global shape) and in `.grad` of the parameter that the optimizer holds (local shape). So clipping over
`model.parameters()` and over `optimizer.param_groups` give the same, one-process result. Only inside the optimizer's
step is the plain tensor there. While gradients accumulate they wait in the look-ups of this rank. Then `handle.grad` is
there and can be dropped, and nothing else can be asked of it.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from armillary.exchanges.exchange import RowExchange
from armillary.exchanges.look_up import LookupTable
from armillary.exchanges.owned_rows import merge_rows
from armillary.plans.parcel import RankInfo

__all__ = ["METADATA", "GradientHandle", "LookUp", "NormSource", "RowTable", "listed"]

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


SWAPPED_ROWS = 16_384  # at once, which needs memory for as many


@dataclass(eq=False)
class LookUp:
    """One look-up of this step. rows: leaf of the autograd graph, or None where this rank only served others."""

    rows: Tensor | None
    route: Any
    has_gradient: bool = False
    is_pushed: bool = False  # its gradients have left; more of them could not follow

    def drop_gradient(self) -> None:
        """It was thrown away before it left; its owners count on this look-up, and are sent zeros for it."""
        if self.rows is not None:
            self.rows.grad, self.has_gradient = None, False

    @property
    def is_awaited(self) -> bool:
        """Whether the backward under way will bring its gradient; it need not reach what did not reach the loss."""
        if self.rows is None or self.has_gradient or torch._C._current_graph_task_id() == -1:
            return False
        will_run: bool = torch._C._will_engine_execute_node(get_gradient_edge(self.rows).node)
        return will_run


def listed(gradient: Tensor) -> Tensor:
    """One that lists its rows, all of them."""
    rows = torch.arange(len(gradient), device=gradient.device)
    return torch.sparse_coo_tensor(rows[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False)


def _nothing(*_: Any) -> None:
    """Nothing is under way, and nobody asks."""


def _untold(table: "RowTable", part: Tensor) -> NoReturn:
    raise AssertionError(f"{table.name}: nobody tells every rank's part yet")


@dataclass(eq=False)
class RowTable:
    """State of one table on one rank. Set by who runs it:

    reads: answers look-ups. norms: computes the global gradient norms. tells: gives every rank's part of a reduction.
    lists_rows: whether the optimizer is given a window's gradient as a list of its rows.
    joins, catches_up, meets: bring in gradients under way, before the gradient is looked at; before the rows are, by
        all ranks at once; and before the rows are, while others may still look up. Collective if any are.
    on_written: told when rows were written to, see `put_back` and `swap_rows`.
    """

    name: str
    shape: torch.Size
    exchange: RowExchange
    place: RankInfo
    has_window: bool
    shard: Tensor  # (local rows, *row shape)
    requires_grad: bool
    reads: Callable[["RowTable", Tensor], tuple[Tensor, Tensor]]
    norms: Callable[["RowTable", float], Tensor]
    tells: Callable[["RowTable", Tensor], Tensor] = _untold
    joins: Callable[[], None] = _nothing
    catches_up: Callable[[], None] = _nothing
    meets: Callable[["RowTable"], None] = _nothing
    on_written: Callable[["RowTable", Tensor | None, int], None] = _nothing
    pending: list[LookUp] = field(default_factory=list)
    lists_rows: bool = False
    averages: dict[str, Tensor] = field(default_factory=dict)  # moving ones of the shard's rows, by their keys

    def __post_init__(self) -> None:
        self.ownership = self.exchange.ownership(self.shape[0], self.place)
        held = self.shard.new_empty((0, *self.shape[1:])) if self.has_window else self.shard
        self.parameter = nn.Parameter(held, requires_grad=self.requires_grad)
        self.window_rows: Tensor | None = None  # local rows that the window holds
        self.epoch = 0  # gradients there have been

    @classmethod
    def owning(cls, whole: Tensor, exchange: RowExchange, place: RankInfo, **fields: Any) -> "RowTable":
        """Keeps the rows of `whole` that this rank owns."""
        ownership = exchange.ownership(whole.shape[0], place)
        if exchange.placement == "replicated":
            shard = whole.detach().clone()
        else:
            shard = (
                whole.detach()[ownership.ids(place.rank)]
                if place.rank in ownership.owners
                else whole.detach()[:0].clone()
            )
        return cls(shape=whole.shape, exchange=exchange, place=place, shard=shard, **fields)

    @property
    def is_pulled(self) -> bool:
        """Whether reading needs the other ranks."""
        return self.exchange.placement == "row_sharded"

    @property
    def row_bytes(self) -> int:
        return self.shard.element_size() * math.prod(self.shape[1:])

    def as_served(self) -> LookupTable:
        return LookupTable(self.name, self.exchange, self.ownership, self.shard)

    # What the handle asks (see `handle.Reader`).
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (any shape) -> the distinct rows (u, *row shape), and where each id stands among them."""
        return self.reads(self, ids)

    @property
    def rows(self) -> Tensor:
        """The newest rows held here. Collective where gradients of them may be under way.

        Raises:
            RuntimeError: inside a backward.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{self.name}: its values are asked for inside a backward; ask before it, or after it")
        self.meets(self)
        return self.shard.detach()

    def everyones(self, part: Tensor) -> Tensor:
        """Collective where the rows are spread: every rank's part, (ranks, *part.shape)."""
        return self.tells(self, part) if self.is_pulled else part.unsqueeze(0)

    def load(self, whole: Tensor) -> None:
        self.meets(self)
        self.shard.copy_(self.part_of(whole.detach().to(self.shard.dtype)))

    def part_of(self, whole: Tensor) -> Tensor:
        """The rows held here of a whole tensor, (rows, *row shape)."""
        if not self.is_pulled:
            return whole
        is_owner = self.place.rank in self.ownership.owners
        return whole[self.ownership.ids(self.place.rank)] if is_owner else whole[:0]

    def gradient_norms(self, order: float) -> Tensor:
        return self.norms(self, order)

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of the rows the optimizer holds here, as a plain tensor; without what is under way."""
        held = self.parameter.grad
        return held.kept if isinstance(held, GradientHandle) else held

    def show_gradient(self, local: Tensor) -> None:
        """From here to the next step the gradient is seen as a global one."""
        self.parameter.grad = GradientHandle(self, self.parameter, local)

    def hand_gradient_over(self) -> None:
        """The optimizer's step begins: it reads the plain tensor."""
        self.epoch += 1
        self.parameter.grad = self.gradient if self.gradient is None or not self.lists_rows else listed(self.gradient)

    def join(self) -> None:
        """Whoever asks for the gradient gets all of it."""
        self.joins()

    def drop_gradient(self) -> None:
        """Also what was accumulated here and has not left."""
        self.parameter.grad = None
        self.drop_accumulated()

    @property
    def accumulates(self) -> bool:
        """Whether gradients of rows that this rank read have not left it."""
        return any(look_up.has_gradient for look_up in self.pending)

    def drop_accumulated(self) -> None:
        for look_up in self.pending:
            look_up.drop_gradient()

    def leave_be(self) -> None:
        """Whoever brought its gradients in is gone."""
        self.joins = self.catches_up = self.meets = self.on_written = _nothing

    # What the executor does.
    @property
    def is_ready(self) -> bool:
        """Every look-up of this rank has its gradient. That one gets none is known at the end of backward."""
        return all(look_up.has_gradient for look_up in self.pending if look_up.rows is not None)

    @property
    def is_learned(self) -> bool:
        """Whether this rank has, or will have in this backward, a gradient of rows it read."""
        return any(look_up.has_gradient or look_up.is_awaited for look_up in self.pending)

    def forget(self, look_ups: Iterable[LookUp]) -> None:
        """Nothing will be pushed of these look-ups."""
        for look_up in look_ups:
            look_up.is_pushed = True
            look_up.rows = None  # its hook refers to the look-up: a circle through C++ that no collector sees
        self.pending = [look_up for look_up in self.pending if not look_up.is_pushed]

    def take_gradients(self, scale: float) -> tuple[list[Tensor], list[Any]]:
        """Gradients and routes of the waiting look-ups, in the order every rank made them; forgets them."""
        empty = self.shard.new_empty((0, *self.shape[1:]))
        gradients, routes = list[Tensor](), list[Any]()
        for look_up in self.pending:
            gradient = empty
            if look_up.rows is not None:
                grad = look_up.rows.grad
                gradient = torch.zeros_like(look_up.rows) if grad is None else grad.mul_(scale) if scale != 1 else grad
            gradients.append(gradient)
            routes.append(look_up.route)
        self.forget(self.pending)
        return gradients, routes

    def put_back(self, rows: Tensor, values: Tensor) -> None:
        """A step has moved these local rows: (k,), (k, *row shape)."""
        before = self.shard._version
        self.shard.index_copy_(0, rows, values)
        self.on_written(self, rows, before)

    def swap_rows(self, rows: Tensor) -> None:
        """The shard and `rows`, (local rows, *row shape), change values. Once they are back, none has moved."""
        before = self.shard._version
        for one, other in zip(self.shard.split(SWAPPED_ROWS), rows.split(SWAPPED_ROWS), strict=True):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        self.on_written(self, None, before)

    def deposit(self, rows: Tensor, sums: Tensor) -> None:
        """Adds merged gradients of local rows: (k,), (k, *row shape)."""
        mine = self.gradient
        self.epoch += mine is None  # handles of a gradient that was dropped are not of this one
        if not self.has_window:
            mine = torch.zeros_like(self.shard) if mine is None else mine
            self.show_gradient(mine.index_add_(0, rows, sums))
            return
        if self.window_rows is not None and mine is not None:
            rows, sums = merge_rows(torch.cat([self.window_rows, rows]), torch.cat([mine, sums]))
        self.window_rows = rows
        self.parameter.grad = None
        self.parameter.data = self.shard.index_select(0, rows)
        self.show_gradient(sums)
