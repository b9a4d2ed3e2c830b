"""Optimizers as the library sees them: several as one, one of the same class to try, and what they keep elsewhere.

`Optimizers` has the groups and the state of all, each parameter in exactly one. `holder` is the one that steps a
parameter.

`twin_to_try` is of the same class over other tensors: nothing of the user's is stepped by it. Some optimizers step
others, or keep tensors in attributes, so attributes are copied with what stands for their parameters. A trial is of one
rank alone, and a request to others is refused.

`kept_elsewhere` finds parameters, or numbers for each of their values, beside groups and state. An exchange by row
moves groups and state to another tensor. It could not move a list of parameters or an inner optimizer.
"""

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AsksOthers",
    "Optimizers",
    "Options",
    "as_one",
    "holder",
    "hooks_beside",
    "kept_elsewhere",
    "kind_of",
    "members",
    "numbered_through",
    "options_of",
    "over",
    "split",
    "step_alone",
    "tried_alone",
    "twin_to_try",
    "wants_closure",
]

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


def over(optimizer: Optimizer, groups: list[Options]) -> Optimizer:
    """The same optimizer over other parameters: without state, hooks, or a wrapper of a scheduler's."""
    other = copy.copy(optimizer)
    for name in [name for name in vars(other) if name.endswith("_hooks")]:
        vars(other)[name] = OrderedDict()
    for wrapper in ("step", "zero_grad"):
        vars(other).pop(wrapper, None)
    other.param_groups, other.state = groups, defaultdict(dict)
    return other


def _inner(attributes: Mapping[str, Any]) -> Iterator[Optimizer]:
    """Optimizers that an optimizer steps in turn."""
    for value in attributes.values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (one for one in held if isinstance(one, Optimizer))


PLACES = ("param_groups", "state", "step", "zero_grad")  # moved, or wrapped by others
DEEPEST = 6


def kept_elsewhere(optimizer: Optimizer, parameter: Tensor) -> str:
    """The attribute that keeps it; empty if none does."""
    seen: set[int] = set()
    for name, value in vars(optimizer).items():
        if name in PLACES or name.endswith("_hooks"):
            continue
        if any(_is_of(one, parameter) for one in _within(value, optimizer, seen, DEEPEST)):
            return name
    return ""


def _is_of(one: Any, parameter: Tensor) -> bool:
    """The parameter itself, its number, or a tensor of its size."""
    if isinstance(one, Tensor):
        return one is parameter or (parameter.dim() > 0 and one.shape == parameter.shape)
    return isinstance(one, int) and one == id(parameter)


def _within(value: Any, outer: Optimizer, seen: set[int], depth: int) -> Iterator[Any]:
    """What is in a value, however it is nested."""
    if isinstance(value, Tensor | int):
        yield value
        return
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from value.parameters()
        return
    inner: list[Any] = []
    if isinstance(value, Optimizer):
        inner = [group["params"] for group in value.param_groups if not _is_shared(group, outer)]
        inner += [value.state] if value.state is not outer.state else []
        inner += [one for name, one in vars(value).items() if name not in PLACES and not name.endswith("_hooks")]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        inner = list(vars(value).values())
    for one in inner:
        yield from _within(one, outer, seen, depth - 1)


def _is_shared(group: dict[str, Any], outer: Optimizer) -> bool:
    """Its list of parameters is the outer one's, so it changes with that."""
    return any(group["params"] is theirs["params"] for theirs in outer.param_groups)


class Optimizers(Optimizer):
    """Not made by torch's own constructor, as it has no parameters of its own."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.members = tuple(optimizers)
        self.defaults = {}
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> "_States":  # type: ignore[override]
        return _States(self.members)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.members:
            one.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Each in turn."""
        for one in self.members:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer that has the groups of all."""
        return numbered_through([one.state_dict() for one in self.members])

    def load_state_dict(self, state_dict: Any) -> None:
        for one, mine in zip(self.members, split(state_dict, self), strict=True):
            one.load_state_dict(mine)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Optimizers":
        return Optimizers([copy.deepcopy(one, memo) for one in self.members])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.members))


class _States(MutableMapping[Tensor, Any]):
    """What is kept of each parameter, wherever it is kept; new state goes to the optimizer that holds the parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._members = optimizers

    def _keeper(self, parameter: Tensor) -> Optimizer | None:
        return next((one for one in self._members if parameter in one.state), None)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in one.state for one in self._members)

    def __getitem__(self, parameter: Tensor) -> Any:
        keeper = self._keeper(parameter)
        if keeper is None:
            raise KeyError(parameter)
        return keeper.state[parameter]

    def __setitem__(self, parameter: Tensor, entries: Any) -> None:
        keeper = self._keeper(parameter) or next(one for one in self._members if _holds(one, parameter))
        keeper.state[parameter] = entries

    def __delitem__(self, parameter: Tensor) -> None:
        keeper = self._keeper(parameter)
        if keeper is None:
            raise KeyError(parameter)
        del keeper.state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for one in self._members:
            yield from list(one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._members)


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(there is parameter for group in optimizer.param_groups for there in group["params"])


def as_one(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """One stays itself.

    Raises:
        ValueError: it is none.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not given or not all(isinstance(one, Optimizer) for one in given):
        raise ValueError(f"want an optimizer of torch, or a list of such, got {optimizer!r}")
    return given[0] if len(given) == 1 else Optimizers(given)


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of torch that it is made of."""
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)


def holder(optimizer: Optimizer, parameter: Tensor) -> Optimizer:
    """The one that steps the parameter; the first, if none does."""
    those = members(optimizer)
    return next((one for one in those if _holds(one, parameter)), those[0])


def hooks_beside(optimizer: Optimizer, mine: Container[int]) -> list[Callable[..., Any]]:
    """Those that run with its steps and are not of these ids, and with the steps of all optimizers. Torch's own, which
    a profiler may ask for, look at nothing."""
    found = [
        hook
        for one in members(optimizer)
        for hooks in (one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks)
        for number, hook in hooks.items()
        if number not in mine
    ]
    everyones = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    return found + [hook for hook in everyones if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def kind_of(optimizer: Optimizer) -> str:
    """As errors and checkpoints call it: "Adam", or "Adam + SGD"."""
    return " + ".join(type(one).__name__ for one in members(optimizer))


def numbered_through(each: Sequence[Any]) -> dict[str, Any]:
    """State_dicts of several optimizers as that of one."""
    state, groups, first = dict[int, Any](), list[dict[str, Any]](), 0
    for one in each:
        state |= {first + number: entries for number, entries in one["state"].items()}
        groups += [{**group, "params": [first + n for n in group["params"]]} for group in one["param_groups"]]
        first += sum(len(group["params"]) for group in one["param_groups"])
    return {"state": state, "param_groups": groups}


def split(whole: Any, optimizer: Optimizer) -> list[dict[str, Any]]:
    """A state_dict of all as one for each member, in their order, each with numbers from 0."""
    groups, found = iter(whole["param_groups"]), []
    for one in members(optimizer):
        mine = list(islice(groups, len(one.param_groups)))
        numbers = [number for group in mine for number in group["params"]]
        own = {number: place for place, number in enumerate(numbers)}
        state = {own[number]: entries for number, entries in whole["state"].items() if number in own}
        found.append({"state": state, "param_groups": [{**g, "params": [own[n] for n in g["params"]]} for g in mine]})
    return found
