"""What stands in the model where a row-sharded table was: a tensor of the global shape that can only be read by row.

The parameter object stays the same (`torch.utils.swap_tensors`), since lists for clipping, an optimizer's groups and
tied modules hold it. `F.embedding`, `F.embedding_bag`, `table[ids]` and `table.index_select(0, ids)` fetch the rows
they need. Anything else raises and names the table. `handle.grad` answers what clipping asks of it, so
`torch.nn.utils.clip_grad_norm_` over `model.parameters()` gives the one-process result.

Without gradients, `F.linear(x, table, bias)` reads the table in blocks of rows (evaluation by full softmax). Norms,
sums, extremes and histograms of the whole table are collectives (`tables/row_values.py`).
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from armillary.tables.row_values import RowValues, as_ddp, reads_rows
from armillary.tables.table import METADATA, GradientHandle

__all__ = ["Reader", "TableHandle", "become", "why_fixed"]


def why_fixed(parameter: Tensor) -> str:
    """Why the object cannot become another tensor, with what to do; empty if it can."""
    if weakref.getweakrefs(parameter):
        return "a weak reference to it is held (weakref, WeakSet); drop it first"
    with torch._C.DisableTorchFunctionSubclass():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a hook is registered on it; put the hook on what the look-up returns"
        count: Callable[[], int] = parameter._use_count  # type: ignore[attr-defined]
        if count() > 1:
            edge = get_gradient_edge(parameter) if parameter.requires_grad and parameter.is_leaf else None
            if edge is None or count() > 2:  # a graph's end is one, a view one more
                return "a view of it is alive, or a graph that took one; delete it first"
    return ""


def become(parameter: Tensor, other: Tensor) -> None:
    """`parameter` is from here on what `other` was; nobody may use `other` any more. Attributes that a script gave to
    the object stay. A graph that ends in it raises if its backward is run.

    Raises:
        ValueError: the object is fixed (`why_fixed`).
    """
    if fixed := why_fixed(parameter):
        raise ValueError(fixed)
    declared = vars(type(parameter)).get("__annotations__", {})
    kept = {name: value for name, value in vars(parameter).items() if name not in declared}
    parameter.grad = None
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, other)
    vars(parameter).update(kept)


LINEAR_BLOCK_ROWS = 16_384


class Reader(Protocol):
    """What the handle needs of the table behind it (see `table.py`)."""

    name: str
    shape: torch.Size
    epoch: int

    @property
    def gradient(self) -> Tensor | None: ...
    @property
    def rows(self) -> Tensor: ...
    def everyones(self, part: Tensor) -> Tensor: ...
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...
    def load(self, whole: Tensor) -> None: ...
    def gradient_norms(self, order: float) -> Tensor: ...
    @property
    def accumulates(self) -> bool: ...
    def drop_gradient(self) -> None: ...
    def drop_accumulated(self) -> None: ...
    def join(self) -> None: ...


class TableHandle(Tensor):
    """A parameter without storage. Counts as `nn.Parameter`, so modules and `parameters()` treat it as one."""

    _is_param = True
    reader: Reader

    @staticmethod
    def __new__(cls, reader: Reader, like: Tensor, requires_grad: bool) -> "TableHandle":
        handle: TableHandle = Tensor._make_wrapper_subclass(
            cls, reader.shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        handle.reader = reader
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"TableHandle({self.reader.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, rows owned by workers)"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @property
    def grad(self) -> "GradientHandle | None":
        local = self.reader.gradient
        if local is None and not self.reader.accumulates:
            return None
        return GradientHandle(self.reader, self, local)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError(
                f"{self.reader.name}: .grad of a row-sharded table can be set to None only, got {type(value)}"
            )
        self.reader.drop_gradient()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableHandle":
        raise _refusal(self.reader.name, "copy.deepcopy", _copies(self.reader.name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(
            self.reader.name,
            "pickle / torch.save",
            "run.export() gives the plain single-device state_dict; after run.close() the model itself is plain",
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return _READS[func](*args, **kwargs)
        if func in METADATA or func in _CONVERSIONS:  # those that change nothing give the handle back
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if reads_rows(func):
            return func(*_as_values(args), **{key: _as_values([value])[0] for key, value in kwargs.items()})
        given = (*args, *kwargs.values())
        name, table = _spelt(func), _name_in(given)
        raise _refusal(table, name, _remedy(name, table, is_written=_is_table(given[0])))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handle = next((arg for arg in args if isinstance(arg, TableHandle)), None)
        if func is torch.ops.aten.detach.default and handle is not None:
            return _detach(handle)
        raise _refusal(_name_in(args), str(func), _remedy(func.__name__, _name_in(args)))


_COPIES = (
    "run.ema(decay) averages the weights as they are trained; run.export() gives plain weights; after run.close() the "
    "model can be copied"
)
_WHOLE = "run.export() gives whole weights on rank 0"
_REMEDIES = {
    **dict.fromkeys(("numpy", "__array__", "tolist", "item", "clone", "unbind", "view", "reshape", "flatten"), _WHOLE),
    "__set__": "write to it before attach, or load_state_dict(...) after",
    "__setitem__": "write to it before attach, or load_state_dict(...) after",
}


def _remedy(operation: str, table: str, is_written: bool = True) -> str:
    """is_written: whether the operation writes to the table, if it writes."""
    if operation.startswith("_to_copy"):
        return "convert and move the model before attach"
    if operation.endswith(("storage", "data_ptr")):  # asked by what writes files
        return _WHOLE
    if operation.startswith("register_"):
        return "put the hook on what the look-up returns"
    if operation.endswith("_") and not operation.endswith("__"):
        return _REMEDIES["__set__"] if is_written else _copies(table)
    return _REMEDIES.get(operation, as_ddp(table))


def _copies(table: str) -> str:
    return f"{_COPIES}; {as_ddp(table)}, for a momentum encoder too"


def _is_table(value: Any) -> bool:
    return isinstance(value, TableHandle) or (isinstance(value, list | tuple) and any(map(_is_table, value)))


def _as_values(args: Sequence[Any]) -> list[Any]:
    """Tables as the values of their rows, also in lists."""
    found: dict[int, RowValues] = {}  # one for each table, as asking for rows may be a collective

    def of(arg: Any) -> Any:
        if isinstance(arg, list | tuple) and _is_table(arg):
            return [of(one) for one in arg]
        if not isinstance(arg, TableHandle):
            return arg
        if id(arg) not in found:
            found[id(arg)] = RowValues(arg.reader, arg.reader.rows, arg.requires_grad)
        return found[id(arg)]

    return [of(arg) for arg in args]


def _spelt(func: Callable[..., Any]) -> str:
    """What the user wrote: `.T` is the getter of a property."""
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" and hasattr(func, "__self__") else name


def _refusal(name: str, operation: str, remedy: str) -> NotImplementedError:
    """No TypeError: torch turns those of operators into Python's own, which do not name the table."""
    return NotImplementedError(
        f"{name}: {operation} needs the whole table, but what the plan exchanges by row can only be read by row "
        "(embedding, embedding_bag, table[ids], index_select(0, ids); without gradients also F.linear(x, table)). "
        f"Remedy: {remedy}"
    )


def _name_in(args: Any) -> str:
    """The name of the first table among the arguments, or among those of a list of tensors."""
    for arg in args:
        if isinstance(arg, TableHandle):
            return arg.reader.name
        if isinstance(arg, list | tuple) and any(isinstance(one, TableHandle) for one in arg):
            return _name_in(arg)
    return "a row-sharded table"


def _embedding(
    input: Tensor, weight: TableHandle, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    _refuse_options(weight, max_norm, scale_grad_by_freq)
    rows, inverse = _read(weight, input)
    return functional.embedding(inverse, rows, _padding(input, inverse, padding_idx, weight))


def _embedding_bag(
    input: Tensor, weight: TableHandle, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    _refuse_options(weight, max_norm, scale_grad_by_freq)
    rows, inverse = _read(weight, input)
    if not len(rows):  # embedding_bag refuses a table without rows: bags without ids are zero
        bags = input.shape[0] if offsets is None else len(offsets) - include_last_offset
        return rows.new_zeros(bags, weight.shape[1]) + rows.sum()
    return functional.embedding_bag(
        inverse, rows, offsets, mode=mode, per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset, padding_idx=_padding(input, inverse, padding_idx, weight),
    )  # fmt: skip


def _traced_embedding(
    weight: TableHandle, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """What torch's tracer makes of `embedding`; -1 is no padding."""
    return _embedding(indices, weight, None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq)


def _traced_embedding_bag(
    weight: TableHandle, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What it makes of `embedding_bag`; nobody reads the other three results."""
    bags = _embedding_bag(
        indices, weight, offsets, None, 2.0, scale_grad_by_freq, ("sum", "mean", "max")[mode],
        per_sample_weights=per_sample_weights, include_last_offset=include_last_offset, padding_idx=padding_idx,
    )  # fmt: skip
    return bags, None, None, None


def _read(table: TableHandle, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A detached handle reads without gradient, as a detached tensor would."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and table.requires_grad):
        return table.reader.read(ids)


def _detach(table: TableHandle) -> TableHandle:
    return TableHandle(table.reader, table, requires_grad=False)


def _refuse_options(weight: TableHandle, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None or scale_grad_by_freq:
        option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
        raise _refusal(weight.reader.name, option, _remedy(option, weight.reader.name))


def _padding(input: Tensor, inverse: Tensor, padding_idx: int | None, weight: TableHandle) -> int | None:
    """Where the padding row stands among the rows read; None if it was not read."""
    if padding_idx is None:
        return None
    there = inverse[input == padding_idx % weight.shape[0]]
    return int(there[0]) if there.numel() else None


def _getitem(table: TableHandle, index: Any) -> Tensor:
    """table[ids] and table[ids, :], ids as in torch: a tensor, list or numpy array of row numbers, or one of them."""
    ids, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if (isinstance(ids, list | int) and not isinstance(ids, bool)) or type(ids).__module__ == "numpy":
        ids = torch.as_tensor(ids)
    is_whole = all(one is ... or (isinstance(one, slice) and one == slice(None)) for one in rest)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not is_whole:
        kind = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) and is_whole else type(index).__name__
        raise _refusal(table.reader.name, f"indexing with {kind}", "index with a tensor of row numbers")
    ids = ids.to(table.device)  # torch takes row numbers from the CPU, too
    rows, inverse = _read(table, torch.where(ids < 0, ids + table.shape[0], ids))
    return rows[inverse]


def _index_select(input: TableHandle, dim: int, index: Tensor) -> Tensor:
    if dim % input.dim() != 0:
        raise _refusal(input.reader.name, f"index_select over dim {dim}", "select rows: dim 0")
    rows, inverse = _read(input, index)
    return rows.index_select(0, inverse)


def _linear(input: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """x W^T + b, reading W (and b) in row blocks; only without gradients."""
    table = weight if isinstance(weight, TableHandle) else bias
    if torch.is_grad_enabled() or not isinstance(weight, TableHandle):
        raise _refusal(
            table.reader.name,
            "linear with gradients",
            f"torch.no_grad() to evaluate; {as_ddp(table.reader.name)}",
        )
    outputs = []
    for first in range(0, weight.shape[0], LINEAR_BLOCK_ROWS):
        ids = torch.arange(first, min(first + LINEAR_BLOCK_ROWS, weight.shape[0]), device=weight.device)
        block = _getitem(weight, ids)
        offsets = None if bias is None else (_getitem(bias, ids) if isinstance(bias, TableHandle) else bias[ids])
        outputs.append(functional.linear(input, block, offsets))
    return torch.cat(outputs, -1)


def _copy_(table: TableHandle, source: Tensor, non_blocking: bool = False) -> TableHandle:
    """Loads a whole table: each worker keeps the rows it owns. `load_state_dict` ends here."""
    if not isinstance(table, TableHandle):
        raise _refusal(_name_in([source]), "copying it into a tensor", _copies(_name_in([source])))
    if isinstance(source, TableHandle) and source.reader is table.reader:
        return table
    if tuple(source.shape) != tuple(table.shape):
        raise ValueError(f"{table.reader.name}: shape {tuple(source.shape)} does not fit {tuple(table.shape)}")
    table.reader.load(source)
    return table


def _set_data(table: TableHandle, value: Tensor) -> None:
    """`Module.to` assigns what it converted, even where nothing was to convert."""
    if not (isinstance(value, TableHandle) and value.reader is table.reader):
        raise _refusal(table.reader.name, ".data = ", _REMEDIES["__set__"])


_CONVERSIONS = {
    Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous,
    torch._has_compatible_shallow_copy_type,  # asked by Module.to
}  # fmt: skip
_READS: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    Tensor.__getitem__: _getitem,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    torch.ops.aten.embedding.default: _traced_embedding,
    torch.ops.aten.embedding_bag.padding_idx: _traced_embedding_bag,
    torch.ops.aten.index_select.default: _index_select,
    functional.linear: _linear,
    Tensor.copy_: _copy_,
    Tensor.detach: _detach,
    Tensor.data.__get__: _detach,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}
