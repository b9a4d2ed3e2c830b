"""Gives values to a model that was built on the meta device, where tables may be larger than a worker's memory.

The truth is plain PyTorch in one process: `model.to_empty(device="cpu")`, then `reset_parameters()` of every module in
the order of `modules()`, from the random stream of rank 0. Every worker replays it bit for bit; of the tables it is to
own by row it keeps its rows only. Departure from `to_empty`: parameters that are tied stay tied.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row
from armillary.facts.plan import Plan
from armillary.runtime.first_error import FirstError
from armillary.runtime.hybrid.blank_table import BlankTable
from armillary.runtime.transport import Transport

__all__ = ["begin_optimizer_state", "materialise"]


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
