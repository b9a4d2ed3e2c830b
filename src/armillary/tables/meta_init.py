"""Gives values to a model that was built on the meta device, where tables may be larger than a worker's memory.

The truth is plain PyTorch in one process: `model.to_empty(device="cpu")`, then `reset_parameters()` of every module in
the order of `modules()`, from the random stream of rank 0. Every worker draws that stream in full, a block of rows at a
time. Of tables it owns by row it keeps its own rows only (`BlankTable`). Departure from `to_empty`: parameters that are
tied stay tied.

The stream of torch's CPU generator can be drawn in blocks bit for bit (measured on torch 2.13, every floating dtype).
`uniform_` allows any blocks. `normal_` draws 16 numbers at a time, and draws the last 16 of a tensor anew if its size
is no multiple of 16. So blocks are multiples of 16 numbers, and the last one has at least 16.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row
from armillary.exchanges.ownership import Ownership
from armillary.plans.plan import Plan
from armillary.transport.agreement import FirstError
from armillary.transport.transport import Transport

__all__ = ["BLOCK_BYTES", "BlankTable", "begin_optimizer_state", "materialise"]

BLOCK_BYTES = 4 << 20
GROUP = 16  # numbers that normal_ draws together

aten = torch.ops.aten


class BlankTable(Tensor):
    """Rows [first, first + shape[0]) of a table. shard: (local rows, *row shape), shared by all slices of the table.

    What `reset_parameters` does to a weight works: `normal_`, `uniform_`, `fill_`, `zero_`, `copy_`, `mul_`, `div_`,
    `clamp_` by numbers, the `torch.nn.init` functions made of them, and all of it on one row or a range of rows.
    """

    _is_param = True
    title: str
    ownership: Ownership
    rank: int
    shard: Tensor
    first: int

    @staticmethod
    def __new__(
        cls, title: str, shape: Sequence[int], ownership: Ownership, rank: int, shard: Tensor, first: int = 0
    ) -> "BlankTable":
        blank: BlankTable = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=shard.dtype, device=torch.device("cpu")
        )
        blank.title, blank.ownership, blank.rank, blank.shard, blank.first = title, ownership, rank, shard, first
        return blank

    @classmethod
    def of(cls, title: str, like: Tensor, ownership: Ownership, rank: int) -> "BlankTable":
        """A table like `like` (which needs no storage) on the CPU; its rows are not a number until they are filled."""
        shard = torch.empty((ownership.shard_rows(rank), *like.shape[1:]), dtype=like.dtype)
        shard.fill_(float("nan") if like.dtype.is_floating_point else 0)
        return cls(title, like.shape, ownership, rank, shard)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlankTable({self.title!r}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        blank, rest = args[0], args[1:]
        if isinstance(blank, BlankTable) and not any(isinstance(arg, BlankTable) for arg in rest):
            if func in (aten.detach.default, aten.alias.default):
                return cls(blank.title, blank.shape, blank.ownership, blank.rank, blank.shard, blank.first)
            if func in _VIEWS and (view := _VIEWS[func](blank, *rest)) is not None:
                return view
            if func is aten.copy_.default:
                return _copy(blank, rest[0])
            if func in _DRAWS or (func in _SCALES and not any(_is_tensor(arg) for arg in rest)):
                return _fill(blank, lambda block, first: func(block, *rest, **(kwargs or {})), func in _SCALES)
        owner = next((arg.title for arg in args if isinstance(arg, BlankTable)), "a row-sharded table")
        raise ValueError(  # a TypeError would be taken for "try the other operand"
            f"{owner}: {func} cannot be done in blocks of rows while a meta-device model is initialised; use normal_, "
            "uniform_, fill_, zero_ or copy_ in reset_parameters, or plan it 'replicated'"
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _spans(rows: int, row_numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows as the random stream wants them."""
    step = max(1, BLOCK_BYTES // max(1, row_numel * itemsize * GROUP)) * GROUP
    first = 0
    while first < rows:
        last = first + step
        if (rows - last) * row_numel < GROUP:
            last = rows
        yield first, last
        first = last


def _fill(blank: BlankTable, write: Callable[[Tensor, int], Any], reads: bool = False) -> BlankTable:
    """Calls write(block, first row) on one block after the other and keeps the rows owned here. reads: the block holds
    the present values (of the rows owned here) before."""
    row_numel = blank.shape[1:].numel()
    for first, last in _spans(blank.shape[0], row_numel, blank.shard.element_size()):
        places, local = _owned(blank, first, last)
        block = torch.empty((last - first, *blank.shape[1:]), dtype=blank.dtype)
        if reads:
            block[places] = blank.shard[local]
        write(block, first)
        blank.shard.index_copy_(0, local, block[places])
    return blank


def _owned(blank: BlankTable, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Of a block of rows: where those owned here stand in it, and where in the shard."""
    if blank.rank not in blank.ownership.owners:
        none = torch.empty(0, dtype=torch.int64)
        return none, none
    keys = blank.ownership.keys(torch.arange(blank.first + first, blank.first + last))
    owner = torch.div(keys, blank.ownership.capacity, rounding_mode="floor")
    places = (owner == blank.ownership.owners.index(blank.rank)).nonzero().squeeze(1)
    return places, keys[places] % blank.ownership.capacity


def _copy(blank: BlankTable, source: Tensor) -> BlankTable:
    whole = source.expand(blank.shape)
    return _fill(blank, lambda block, first: block.copy_(whole[first : first + len(block)]))


def _row(blank: BlankTable, dim: int, index: int) -> Tensor | None:
    """One row: the shard's own if it is owned here, else one that nobody looks at (random numbers are drawn alike)."""
    if dim != 0:
        return None
    row = index % blank.shape[0]
    places, local = _owned(blank, row, row + 1)
    return blank.shard[local[0]] if len(places) else blank.shard.new_full(blank.shape[1:], float("nan"))


def _slice(
    blank: BlankTable, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    if dim != 0 or step != 1:
        return None
    first, last, _ = slice(start, end).indices(blank.shape[0])
    shape = (max(0, last - first), *blank.shape[1:])
    return BlankTable(blank.title, shape, blank.ownership, blank.rank, blank.shard, blank.first + first)


_VIEWS: dict[Any, Callable[..., Tensor | None]] = {aten.select.int: _row, aten.slice.Tensor: _slice}
_DRAWS = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}
_SCALES = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default}


def materialise(model: nn.Module, optimizer: Optimizer, plan: Plan, transport: Transport) -> dict[str, Tensor]:
    """Collective. Parameters keep their identity (the optimizer holds them), tables stay on the meta device.

    Returns:
        The rows this rank owns of each table that the plan shards by row: (local rows, *row shape), by name. Empty,
        and nothing done, where no part of the model is on the meta device.

    Raises:
        ValueError: a module cannot initialise itself, leaves values without a number, or does to a table what cannot be
            done in blocks of rows.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if not any(tensor.is_meta for tensor in [*parameters.values(), *buffers.values()]):
        return {}
    shards: dict[str, Tensor] = {}
    trouble = FirstError("attach")
    with trouble.kept():
        modules = _modules_on_meta(model)
    trouble.agree(transport)
    blanks = {
        group.parameters[0]: _blank(group.parameters[0], parameters[group.parameters[0]], group.exchange, transport)
        for group in plan.groups
        if group.layout == "row_sharded" and parameters[group.parameters[0]].is_meta
    }
    whole = {name: parameter for name, parameter in parameters.items() if parameter.is_meta and name not in blanks}
    for parameter in whole.values():
        _give_storage(parameter)
    _give_buffers_storage(model)
    for parameter in whole.values():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][entry] = value.contiguous()
    by_parameter = {parameters[name]: blank for name, blank in blanks.items()}
    with _standing_in(model, by_parameter), _stream_of_rank_zero(transport), trouble.kept():
        for module in modules:
            module.reset_parameters()  # type: ignore[operator]
        shards = {name: blank.shard for name, blank in blanks.items()}
        _refuse_unfilled({**whole, **dict(model.named_buffers()), **shards})
    trouble.agree(transport)
    return shards


def _modules_on_meta(model: nn.Module) -> list[nn.Module]:
    """Modules with tensors of their own on the meta device, in the order of `modules()`."""
    found = []
    for path, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        if not any(tensor.is_meta for tensor in own.values()):
            continue
        title = f"module {path or 'the model itself'!r} ({type(module).__name__})"
        real = [name for name, tensor in own.items() if not tensor.is_meta]
        if real:
            raise ValueError(f"{title} is on the meta device except for {real}; build all of it there")
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{title} is on the meta device and has no reset_parameters(), so nobody knows the values of "
                f"{sorted(own)}; give it one, or build the model on a real device"
            )
        found.append(module)
    return found


def _blank(name: str, parameter: Tensor, exchange: Any, transport: Transport) -> BlankTable:
    ownership = build_row(exchange.name, **exchange.options).ownership(parameter.shape[0], transport.place)
    return BlankTable.of(name, parameter, ownership, transport.place.rank)


def _unset(like: Tensor) -> Tensor:
    """Not a number, so that what nobody initialises is found."""
    empty = torch.empty_like(like, device="cpu", requires_grad=False)
    return empty.fill_(float("nan")) if like.dtype.is_floating_point else empty.zero_()


def _give_storage(parameter: nn.Parameter) -> None:
    """The same object, on the CPU."""
    attributes = dict(parameter.__dict__)
    torch.utils.swap_tensors(parameter, nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad))
    parameter.__dict__.update(attributes)


def _give_buffers_storage(model: nn.Module) -> None:
    given: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = given.setdefault(buffer, _unset(buffer))


@contextmanager
def _standing_in(model: nn.Module, blanks: dict[nn.Parameter, BlankTable]) -> Iterator[None]:
    """Modules hold the blank tables in place of their parameters (tied weights: several modules)."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in blanks
    ]
    for module, name, parameter in places:
        module._parameters[name] = blanks[parameter]  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


@contextmanager
def _stream_of_rank_zero(transport: Transport) -> Iterator[None]:
    """Every rank draws what rank 0 draws. A rank that had a stream of its own gets it back as it was."""
    mine = torch.get_rng_state()
    first = mine.clone()
    transport.spread(first)
    torch.set_rng_state(first)
    try:
        yield
    finally:
        if not torch.equal(mine, first):
            torch.set_rng_state(mine)


def _refuse_unfilled(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and any(bool(block.isnan().any()) for block in tensor.detach().split(4096)):
            raise ValueError(
                f"{name!r} was on the meta device, and reset_parameters() of its module left values of it "
                "without a number; initialise all of it there"
            )


def begin_optimizer_state(optimizer: Optimizer) -> None:
    """State made when the optimizer was built over a meta-device model (Adagrad's sums) has no values: it begins again,
    as one number seen in the parameter's shape. Of a table, only the rows owned here will ever be given memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for entry in [entry for entry, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
                first = _first_number(optimizer, group, entry)
                state[entry] = torch.tensor(first, dtype=state[entry].dtype).expand(state[entry].shape)


def _first_number(optimizer: Optimizer, group: dict[str, Any], entry: str) -> float:
    """What the state of every parameter begins with, from a small optimizer of the same class and options."""
    known = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key != "params" and key in known}
    small = nn.Parameter(torch.ones(2))
    begun = type(optimizer)([small], **options).state[small][entry]
    if not bool((begun == begun[0]).all()):
        raise ValueError(
            f"attach: {type(optimizer).__name__} begins {entry!r} with other numbers for every value; build the model "
            "on a real device"
        )
    return float(begun[0])
