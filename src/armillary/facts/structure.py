"""Any nest of values taken apart into leaves, and put together again: torch's pytree, and dataclasses besides.

Torch opens tuples, named tuples, lists, dicts and what libraries have registered. Many models return a dataclass that
nobody registered; to register it here would change torch for the whole process.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Structure", "TakenApart", "mapped", "take_apart", "unopened"]

CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """What is left of a nest without its leaves. Two are equal where the nests are alike.

    Args:
        spec: of torch, to which a dataclass is a leaf.
        records: by leaf of that: the dataclass that stands there, or None.
    """

    spec: TreeSpec
    records: tuple["_Record | None", ...]

    @property
    def count(self) -> int:
        """Of leaves."""
        return sum(1 if one is None else one.inside.count for one in self.records)

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """
        Raises:
            ValueError: another number of leaves.
        """
        if len(leaves) != self.count:
            raise ValueError(f"structure: {self.count} leaves are wanted, got {len(leaves)}")
        rest, parts = list(leaves), list[Any]()
        for record in self.records:
            count = 1 if record is None else record.inside.count
            mine, rest = rest[:count], rest[count:]
            parts.append(mine[0] if record is None else record.made_of(mine))
        return tree_unflatten(parts, self.spec)

    def __str__(self) -> str:
        return str(self.put_together([_Star()] * self.count))


@dataclass(frozen=True)
class _Record:
    """A dataclass: what it is, what its attributes are called, how they are nested."""

    kind: type
    names: tuple[str, ...]
    inside: Structure

    def made_of(self, leaves: Sequence[Any]) -> Any:
        """Without a call of its constructor, which may want other arguments."""
        made: Any = object.__new__(self.kind)
        for name, value in zip(self.names, self.inside.put_together(leaves), strict=True):
            object.__setattr__(made, name, value)
        return made


class _Star:
    def __repr__(self) -> str:
        return "*"


class TakenApart(NamedTuple):
    """leaves: tensors, and what else stands in the nest."""

    leaves: list[Any]
    structure: Structure


def take_apart(value: Any) -> TakenApart:
    """A dataclass holds the attributes that are set."""
    parts, spec = tree_flatten(value, is_leaf=_is_record)
    leaves, records = list[Any](), list[_Record | None]()
    for part in parts:
        if not _is_record(part):
            leaves.append(part)
            records.append(None)
            continue
        names = dict.fromkeys(one.name for one in fields(part) if hasattr(part, one.name))
        names |= dict.fromkeys(vars(part) if hasattr(part, "__dict__") else ())
        inside = take_apart([getattr(part, name) for name in names])
        leaves += inside.leaves
        records.append(_Record(type(part), tuple(names), inside.structure))
    return TakenApart(leaves, Structure(spec, tuple(records)))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest with every tensor changed."""
    leaves, structure = take_apart(value)
    return structure.put_together([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def unopened(value: Any) -> str:
    """The class of a leaf that is no tensor and no constant, so that tensors may hide in it; empty if there is none."""
    others = (leaf for leaf in take_apart(value).leaves if not isinstance(leaf, (Tensor, *CONSTANTS)))
    return next((type(leaf).__name__ for leaf in others), "")


def _is_record(value: Any) -> bool:
    if isinstance(value, (type, Tensor, nn.Module, dict, list, tuple)) or type(value) in SUPPORTED_NODES:
        return False
    return is_dataclass(value)
