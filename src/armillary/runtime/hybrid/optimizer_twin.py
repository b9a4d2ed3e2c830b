"""An optimizer of the same class over other tensors, to see what it does: nothing of the user's is stepped by it.

Some optimizers step others, or keep tensors in attributes. So attributes are copied, and wherever they hold a parameter
of the optimizer's, the copy holds what stands for it. A trial is of one rank alone: a request to others is refused.
"""

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["AsksOthers", "Options", "options_of", "step_alone", "tried_alone", "twin_to_try", "wants_closure"]

Options = dict[str, Any]

LEAST_RATE, TRIED_RATE = 1e-4, 0.1  # a lower learning rate, as at the beginning of a warm-up, would hide what is done


class AsksOthers(RuntimeError):
    """A trial is of one rank alone; the others would not answer."""


class _Alone(TorchDispatchMode):
    """Refuses every request to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise AsksOthers(f"asks other ranks in its step ({func._opname.strip('_')})")
        return func(*args, **(kwargs or {}))


@contextmanager
def tried_alone() -> Iterator[None]:
    """Inside, nothing of a trial stays (random state, warnings), and hooks of all optimizers hear nothing."""
    hooks: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)


def step_alone(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: the step asks other ranks.
    """
    with _Alone():
        optimizer.step()


def options_of(optimizer: Optimizer, parameter: Tensor) -> Options | None:
    """The optimizer's param group that holds the parameter."""
    for options in optimizer.param_groups:
        if any(held is parameter for held in options["params"]):
            return options
    return None


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether it steps by a closure alone (LBFGS): it cannot be tried, as nobody here knows a loss of a matrix."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def twin_to_try(
    optimizer: Optimizer, group: Options, parameters: Sequence[nn.Parameter], is_built: bool = False
) -> Optimizer:
    """An optimizer of the same class and attributes over other parameters, with the options of a group and no hooks.

    A learning rate near zero (warm-up begins so) would hide what the optimizer does, so it is replaced.

    Args:
        is_built: its state is what the constructor makes for these parameters, as Adagrad's is; else there is none.

    Raises:
        Exception: whatever an attribute raises that cannot be copied.
    """
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    if "lr" in options and float(options["lr"]) < LEAST_RATE:
        options["lr"] = TRIED_RATE
    known = {id(held): parameters[0] for one in optimizer.param_groups for held in one["params"]}
    like = _twin(optimizer, {**options, "params": list(parameters)}, dict(known), group["params"])
    if is_built:
        named = inspect.signature(type(optimizer)).parameters
        with _Alone():
            built = type(optimizer)(list(parameters), **{key: one for key, one in options.items() if key in named})
        like.state.update(built.state)
    return like


def _twin(optimizer: Optimizer, group: Options, memo: dict[int, Any], meant: Sequence[Tensor]) -> Optimizer:
    """memo: what stands for an object, as `copy.deepcopy` has it. meant: the parameters whose group it is."""
    like = object.__new__(type(optimizer))
    memo[id(optimizer)] = like
    like.__dict__["param_groups"] = memo.setdefault(id(optimizer.param_groups), [group])
    like.__dict__["state"] = memo.setdefault(id(optimizer.state), defaultdict(dict))
    for inner in _inner(vars(optimizer)):
        if id(inner) not in memo:
            own = next((one for one in (options_of(inner, p) for p in meant) if one is not None), None)
            theirs = {key: one for key, one in (own or {}).items() if key != "params"}
            _twin(inner, {**copy.deepcopy(theirs), "params": group["params"] if own else []}, memo, meant)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            like.__dict__[name] = type(value)()
        elif name not in like.__dict__ and name not in ("step", "zero_grad"):  # wrappers, which are of the original
            like.__dict__[name] = copy.deepcopy(value, memo)
    return like


def _inner(attributes: Mapping[str, Any]) -> Iterator[Optimizer]:
    """Optimizers that an optimizer steps in turn."""
    for value in attributes.values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (one for one in held if isinstance(one, Optimizer))
