"""Several optimizers of one model, seen as one: the groups of all, the state of all, each parameter in exactly one.

Whoever asks what is kept of a parameter asks this as it would ask one optimizer of torch. Whoever wants to try or copy
the optimizer that steps a parameter asks `holder`.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["Optimizers", "as_one", "holder", "hooks_beside", "kind_of", "members", "numbered_through", "split"]


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
