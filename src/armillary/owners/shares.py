"""Who owns what, and the part of one owner: values, optimizer state, and one optimizer step for every push.

Parameters that are read whole are dealt by their bytes, each whole to one owner; rows of a table are dealt to all, one
after the other. An owner steps by an optimizer of its own, of the user's class, with the options that the worker sends.
Rows that a push does not name stay as they are, whatever the optimizer would do to them.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.ownership import Ownership

__all__ = ["GroupOptions", "OwnedPart", "Ownings", "RowGradient", "joined_rows", "options_of", "owned_by_bytes"]

GroupOptions = list[dict[str, Any]]  # of every parameter group, all but the parameters


@dataclass(frozen=True)
class Ownings:
    """dense: names by owner, each in the order of the model. tables: by name, whose rows all ranks own."""

    dense: tuple[tuple[str, ...], ...]
    tables: Mapping[str, Ownership]

    @property
    def owners(self) -> range:
        return range(len(self.dense))


class RowGradient(NamedTuple):
    """rows: of the owner's part of a table, int64, ascending. values: (rows, *row shape)."""

    rows: Tensor
    values: Tensor


def owned_by_bytes(parameters: Mapping[str, Tensor], tables: Iterable[str], workers: int) -> Ownings:
    """The largest first, each to the owner that has least; alike on every rank."""
    by_row = {*tables}
    loads, owner_of = [0] * workers, dict[str, int]()
    whole = [name for name in parameters if name not in by_row]
    for name in sorted(whole, key=lambda name: -parameters[name].nbytes):
        owner_of[name] = min(range(workers), key=lambda rank: loads[rank])
        loads[owner_of[name]] += parameters[name].nbytes
    dense = tuple(tuple(name for name in whole if owner_of[name] == rank) for rank in range(workers))
    ranks, rows = tuple(range(workers)), {name: len(one) for name, one in parameters.items() if name in by_row}
    return Ownings(dense, {name: Ownership(count, ranks, workers) for name, count in rows.items()})


def options_of(optimizer: Optimizer) -> GroupOptions:
    """As they are now; tensors among them are copied."""
    return [
        {key: one.clone() if isinstance(one, Tensor) else one for key, one in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class OwnedPart:
    """Of one rank.

    Args:
        parameters: all that are trained, by name, whole; they are copied. optimizer: over them; it is not stepped.
    """

    def __init__(
        self, ownings: Ownings, rank: int, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> None:
        self.ownings, self.rank = ownings, rank
        self.whole = {name: nn.Parameter(parameters[name].detach().clone()) for name in ownings.dense[rank]}
        self.shards: dict[str, Tensor] = {}
        self.windows: dict[str, nn.Parameter] = {}  # rows of a table while they are stepped
        self.row_state: dict[str, dict[str, Tensor]] = {}  # of a table, one value for each of its values
        for name, dealt in ownings.tables.items():
            self.shards[name] = parameters[name].detach()[dealt.ids(rank)]
            self.windows[name] = nn.Parameter(self.shards[name][:0].clone())
            self.row_state[name] = {}
        self.optimizer = _alone(optimizer, {id(parameters[name]): one for name, one in self._stepped()})
        for name, one in self._stepped():
            self._take_state(name, one, parameters[name], optimizer.state.get(parameters[name], {}))

    def _stepped(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.whole.items(), *self.windows.items()]

    def _take_state(self, name: str, mine: nn.Parameter, theirs: Tensor, state: Mapping[str, Any]) -> None:
        if name in self.windows:
            rows = {key: one for key, one in state.items() if _is_like(one, theirs)}
            self.row_state[name] = {key: one[self.ownings.tables[name].ids(self.rank)] for key, one in rows.items()}
            state = {key: one for key, one in state.items() if key not in rows}
        if state:
            self.optimizer.state[mine] = copy.deepcopy(dict(state))

    def read(self, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Copies of what is owned whole, then of these rows of each table, in the order of `Ownings`."""
        whole = [one.detach().clone() for one in self.whole.values()]
        return [*whole, *(self.shards[name].index_select(0, rows[name]) for name in self.ownings.tables)]

    @torch.no_grad()
    def step(self, options: GroupOptions, dense: Mapping[str, Tensor], rows: Mapping[str, RowGradient]) -> None:
        """One optimizer step of what has a gradient."""
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update(now)
        for name, gradient in dense.items():
            self.whole[name].grad = gradient
        for name, (mine, gradient) in rows.items():
            window = self.windows[name]
            window.data = self.shards[name].index_select(0, mine)
            window.grad = gradient
            kept = {key: one.index_select(0, mine) for key, one in self.row_state[name].items()}
            if kept:
                self.optimizer.state[window].update(kept)
        with torch.enable_grad():
            self.optimizer.step()
        for name in dense:
            self.whole[name].grad = None
        for name, (mine, _) in rows.items():
            self._put_back(name, mine)

    def _put_back(self, name: str, mine: Tensor) -> None:
        window, shard = self.windows[name], self.shards[name]
        values, state = window.detach(), self.optimizer.state[window]
        shard.index_copy_(0, mine, values)
        for key in [key for key, one in state.items() if _is_like(one, values)]:
            held = self.row_state[name].setdefault(key, state[key].new_zeros(shard.shape))
            held.index_copy_(0, mine, state.pop(key))
        window.grad = None
        window.data = shard[:0].clone()

    def rest_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of it here: of a table, what is not by row, such as a count of steps."""
        one = self.windows.get(name, self.whole.get(name))
        return {} if one is None else dict(self.optimizer.state.get(one, {}))

    def tensors(self, name: str) -> list[Tensor]:
        """All that is held of a parameter here."""
        values = self.shards.get(name, self.whole.get(name))
        state = [*self.rest_of(name).values(), *self.row_state.get(name, {}).values()]
        return [one for one in [values, *state] if isinstance(one, Tensor)]


def _is_like(one: Any, values: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == values.shape and one.dim() > 0


def _alone(optimizer: Optimizer, mine: Mapping[int, nn.Parameter]) -> Optimizer:
    """One of the same class and options over these parameters, by the ids of those that they stand for; without hooks,
    state or a scheduler's wrapper."""
    one = copy.copy(optimizer)
    for name in [name for name in vars(one) if name.endswith("_hooks")]:
        vars(one)[name] = OrderedDict()
    for wrapper in ("step", "zero_grad"):
        vars(one).pop(wrapper, None)
    one.state = defaultdict(dict)
    one.param_groups = [
        {**group, "params": [mine[id(held)] for held in group["params"] if id(held) in mine]}
        for group in optimizer.param_groups
    ]
    return one


def joined_rows(parts: Sequence[Tensor], dealt: Ownership) -> Tensor:
    """A whole table, or what is shaped as one, from the parts of all owners."""
    whole = parts[0].new_empty((dealt.rows, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[dealt.ids(rank)] = part
    return whole
