"""Who owns what, and the part of one owner: values, optimizer state, and one optimizer step for every push.

Parameters that are read whole are dealt by their bytes, each whole to one owner; rows of a table are dealt to all, one
after the other. An owner steps by an optimizer of its own, of the user's class, with the options that the worker sends.
Rows that a push does not name stay as they are, whatever the optimizer would do to them.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.ownership import Ownership
from armillary.owners.bodies import Parts
from armillary.tables.optimizer_state import Held, close_window, is_row_shaped, open_window
from armillary.tables.optimizers import over

__all__ = ["GroupOptions", "OwnedPart", "Ownings", "joined_rows", "options_of", "owned_by_bytes"]

GroupOptions = list[dict[str, Any]]  # of every parameter group, all but the parameters


@dataclass(frozen=True)
class Ownings:
    """dense: names by owner, each in the order of the model. tables: by name, whose rows all ranks own."""

    dense: tuple[tuple[str, ...], ...]
    tables: Mapping[str, Ownership]

    @property
    def owners(self) -> range:
        return range(len(self.dense))


@dataclass(eq=False)
class _Window:
    """A table's rows here, and those of them that are stepped (`tables/optimizer_state.Windowed`)."""

    shard: Tensor
    parameter: nn.Parameter
    window_rows: Tensor | None = None

    def put_back(self, rows: Tensor, values: Tensor) -> None:
        self.shard.index_copy_(0, rows, values)


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
        self.tables: dict[str, _Window] = {}
        self.row_state: dict[str, Held] = {name: {} for name in ownings.tables}
        for name, dealt in ownings.tables.items():
            shard = parameters[name].detach()[dealt.ids(rank)]
            self.tables[name] = _Window(shard, nn.Parameter(shard[:0].clone()))
        self._stepped = self.whole | {name: one.parameter for name, one in self.tables.items()}
        mine = {id(parameters[name]): one for name, one in self._stepped.items()}
        groups = [
            {**group, "params": [mine[id(one)] for one in group["params"] if id(one) in mine]}
            for group in optimizer.param_groups
        ]
        self.optimizer = over(optimizer, groups)
        for name, one in self._stepped.items():
            self._take_state(name, one, parameters[name], optimizer.state.get(parameters[name], {}))

    def _take_state(self, name: str, mine: nn.Parameter, theirs: Tensor, state: Mapping[str, Any]) -> None:
        if name in self.tables:
            rows = {key: one for key, one in state.items() if is_row_shaped(one, theirs)}
            self.row_state[name] = {key: one[self.ownings.tables[name].ids(self.rank)] for key, one in rows.items()}
            self.optimizer.state[mine] = copy.deepcopy({key: one for key, one in state.items() if key not in rows})
        elif state:
            self.optimizer.state[mine] = copy.deepcopy(dict(state))

    def read(self, rows: Parts) -> dict[str, Tensor]:
        """Copies of what is owned whole, then of these rows of each table, in the order of `Ownings`."""
        tables = {name: one.shard.index_select(0, rows[name][0]) for name, one in self.tables.items()}
        return {name: one.detach().clone() for name, one in self.whole.items()} | tables

    @torch.no_grad()
    def step(self, options: GroupOptions, gradients: Parts) -> None:
        """One optimizer step of what has a gradient: of a table the rows, ascending, before their values."""
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update(now)
        for name, (*rows, gradient) in gradients.items():
            if rows:
                table = self.tables[name]
                table.window_rows = rows[0]
                table.parameter.data = table.shard.index_select(0, rows[0])
                open_window(table, self.optimizer, self.row_state[name])
            self._stepped[name].grad = gradient
        with torch.enable_grad():
            self.optimizer.step()
        for name in gradients:
            if name in self.tables:
                close_window(self.tables[name], self.optimizer, self.row_state[name])
            self._stepped[name].grad = None

    def rest_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of it here: of a table, what is not by row, such as a count of steps."""
        state = self.optimizer.state.get(self._stepped[name], {}) if name in self._stepped else {}
        return {key: value for key, value in state.items() if key not in self.row_state.get(name, {})}

    def tensors(self, name: str) -> list[Any]:
        """All that is held of a parameter here."""
        values = self.tables[name].shard if name in self.tables else self.whole.get(name)
        return [values, *self.rest_of(name).values(), *self.row_state.get(name, {}).values()]


def joined_rows(parts: Sequence[Tensor], dealt: Ownership) -> Tensor:
    """A whole table, or what is shaped as one, from the parts of all owners."""
    whole = parts[0].new_empty((dealt.rows, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[dealt.ids(rank)] = part
    return whole
