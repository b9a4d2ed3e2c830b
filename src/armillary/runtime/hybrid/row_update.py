"""Runs the user's optimizer on some rows of a table: where the row lives, and exactly as in one process where that is
said.

A window update gathers the touched rows of weight and optimizer state, lets the optimizer step on them, and puts them
back. That is exact when rows without gradient would not have moved; `leaves_untouched_rows` finds out by trying the
optimizer on a small matrix, never by its type. `steps_by_row` finds out the same way whether an optimizer may be
split by row at all.
"""

import copy
import inspect
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.table import RowTable

__all__ = [
    "Held", "close_window", "leaves_untouched_rows", "open_window", "options_of", "replace_parameter", "steps_by_row",
    "takes_listed_rows", "twin", "twin_to_try", "wants_closure",
]  # fmt: skip

Held = dict[str, Tensor]  # optimizer state of a whole shard: name -> (local rows, *row shape)


def options_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    """The optimizer's param group that holds the parameter."""
    for options in optimizer.param_groups:
        if any(held is parameter for held in options["params"]):
            return options
    return None


def open_window(table: RowTable, optimizer: Optimizer, held: Held) -> None:
    """Puts the state of the window's rows where the optimizer looks for it; `held` keeps the shard's."""
    if table.window_rows is None:
        return
    state = optimizer.state.get(table.parameter, {})
    for name, whole in held.items():
        state[name] = whole.index_select(0, table.window_rows)


def close_window(table: RowTable, optimizer: Optimizer, held: Held) -> None:
    """Puts rows and state back into the shard and empties the window. New state begins as zero rows."""
    rows = table.window_rows
    if rows is None:
        return
    window = table.parameter.detach()
    table.put_back(rows, window)
    state = optimizer.state.get(table.parameter, {})
    for name, value in list(state.items()):
        if not isinstance(value, Tensor) or value.shape != window.shape or value.dim() == 0:
            continue
        if name not in held:
            held[name] = value.new_zeros(table.shard.shape)
        held[name].index_copy_(0, rows, value)
        state[name] = value[:0]
    table.window_rows = None
    gradient = table.parameter.grad
    table.parameter.grad = None
    table.parameter.data = window[:0].clone()
    del gradient


def replace_parameter(optimizer: Optimizer, old: Tensor, table: RowTable) -> Held:
    """Makes the optimizer hold the table's parameter in place of `old`, with the state of the rows owned here.

    Returns:
        The shard's state, for `open_window`; empty where the optimizer holds the shard itself.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [table.parameter if parameter is old else parameter for parameter in group["params"]]
    if old not in optimizer.state:
        return {}
    state = optimizer.state.pop(old)
    held: Held = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape and value.dim() > 0:
            mine = value.clone() if not table.is_pulled else value[_owned(table)]
            if not table.has_window:
                state[name] = mine
            else:
                held[name], state[name] = mine, mine[:0].clone()
    optimizer.state[table.parameter] = state
    return held


def _owned(table: RowTable) -> Tensor:
    if table.place.rank not in table.ownership.owners:
        return torch.empty(0, dtype=torch.int64)
    return table.ownership.ids(table.place.rank)


def twin(optimizer: Optimizer, options: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class over other parameters, with these options and no state or hooks."""
    other = copy.copy(optimizer)  # torch copies groups and state only
    for name, value in vars(optimizer).items():
        if name not in vars(other) and name not in ("step", "zero_grad"):  # wrappers, which are of the original
            setattr(other, name, value)
    other.param_groups = [{**options, "params": parameters}]
    other.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(other, hooks, type(getattr(optimizer, hooks))())
    return other


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether it steps by a closure alone (LBFGS): it cannot be tried, as nobody here knows a loss of a matrix."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def twin_to_try(optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """A twin with state as the optimizer itself would make it.

    A learning rate of zero (warm-up begins so) would hide what the optimizer does, so it is replaced.
    """
    options = {key: value for key, value in group.items() if key != "params"}
    if "lr" in options and not float(options["lr"]):
        options["lr"] = 0.1
    like = twin(optimizer, options, parameters)
    for parameter in parameters:
        _open_state(optimizer, like, parameter)
    return like


def _open_state(optimizer: Optimizer, like: Optimizer, parameter: nn.Parameter) -> None:
    """Optimizers that make their state when they are built (Adagrad) are given it here, from a sibling's shape."""
    for other in optimizer.state:
        state = optimizer.state[other]
        if any(isinstance(value, Tensor) and value.shape == other.shape and value.dim() for value in state.values()):
            for name, value in state.items():
                row_like = isinstance(value, Tensor) and value.shape == other.shape and value.dim() > 0
                fill = float(value[(0,) * value.dim()]) if row_like and value.numel() else 0.0
                fill = fill if math.isfinite(fill) else 0.0  # of a training that has blown up
                like.state[parameter][name] = torch.full_like(parameter, fill) if row_like else copy.deepcopy(value)
            return


def _trial(optimizer: Optimizer, group: dict[str, Any], weight: Tensor, gradients: list[Tensor]) -> list[Held]:
    """What such an optimizer makes of a matrix: weight and state of its shape, before and after every step."""
    parameter = nn.Parameter(weight.clone())
    like = twin_to_try(optimizer, group, [parameter])
    seen = [_seen(like, parameter)]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        try:
            like.step()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step a matrix with a plain dense gradient, which is what it gets "
                f"here ({error}); take one that can, such as Adagrad or Adam"
            ) from error
        seen.append(_seen(like, parameter))
    return seen


def _seen(like: Optimizer, parameter: nn.Parameter) -> Held:
    state = {name: v for name, v in like.state[parameter].items() if isinstance(v, Tensor) and v.dim()}
    return {name: value.detach().clone() for name, value in {**state, "": parameter}.items()}


def _matrices() -> list[Tensor]:
    """A weight and two gradients, 6 x 4."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.rand(3, 6, 4, generator=generator, dtype=torch.float64).add(0.5).unbind(0))


def steps_by_row(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether stepping a matrix whole and row-split, each piece with an optimizer of its own as on ranks of their own,
    gives the same: true of element-wise optimizers.

    Raises:
        ValueError: the optimizer does not move the matrix at all, so nothing can be said about it.
    """
    if wants_closure(optimizer):
        return False
    weight, *gradients = _matrices()
    whole = [seen[""] for seen in _trial(optimizer, group, weight, gradients)]
    if torch.equal(whole[0], whole[-1]):
        raise ValueError(f"{type(optimizer).__name__} does not move a matrix whose gradient is not zero")
    cuts = [2, 1, 3]
    pieces = [
        _trial(optimizer, group, piece, list(parts))
        for piece, *parts in zip(weight.split(cuts), *(gradient.split(cuts) for gradient in gradients), strict=True)
    ]
    split = [torch.cat([piece[""] for piece in step]) for step in zip(*pieces, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(whole, split, strict=True))


def takes_listed_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a gradient that lists its rows moves a matrix as the plain dense one does, and all state is dense."""
    if wants_closure(optimizer):
        return False
    weight, gradient, other = _matrices()
    gradient[:3] = other[2:4] = 0
    try:
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch warns where an optimizer leaves that open
            listed, plain = (
                _trial(optimizer, group, weight, gradients)
                for gradients in ([gradient.to_sparse(1), other.to_sparse(1)], [gradient, other])
            )
    except ValueError:
        return False
    return all(
        one.keys() == two.keys()
        and all(
            not one[name].is_sparse and torch.allclose(one[name], two[name], rtol=1e-12, atol=1e-14) for name in one
        )
        for one, two in zip(listed, plain, strict=True)
    )


def leaves_untouched_rows(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a row whose gradient is zero stays where it is, whatever its history, and its state too (RMSprop leaves
    the row but not its state)."""
    if wants_closure(optimizer):
        return False
    weight, gradient, _ = _matrices()
    quiet = gradient.clone()
    quiet[:3] = 0
    seen = _trial(optimizer, group, weight, [quiet, gradient, quiet])
    return all(
        torch.equal(value[:3], before.get(name, torch.zeros_like(value))[:3])
        for before, after in (seen[:2], seen[2:])
        for name, value in after.items()
    )
