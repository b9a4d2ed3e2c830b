"""How the ranks of a job are arranged: named axes, the first of which varies slowest.

Ranks along the data axis train on distinct data; ranks along any other axis share the data of their replica. So a mean
of gradients divides by the data coordinates and not by the ranks.

Source: torch.distributed.device_mesh, whose names and order these are; unlike it, a mesh here opens no process group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

__all__ = ["DATA", "STAGE", "Axis", "Mesh"]

DATA: Final = "data"
STAGE: Final = "stage"


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh and how many ranks lie along it."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.size < 1:
            raise ValueError(f"mesh: want an axis with a plain name and 1 rank or more, got {self.name!r}, {self.size}")


@dataclass(frozen=True)
class Mesh:
    """
    Args:
        axes: the first varies slowest; ranks are numbered in that order.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"mesh: want one axis or more, each with a name of its own, got {names}")

    @classmethod
    def of(cls, **sizes: int) -> "Mesh":
        """As in `Mesh.of(data=2, stage=4)`."""
        return cls(tuple(Axis(name, size) for name, size in sizes.items()))

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @property
    def workers(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def data_coordinates(self) -> int:
        """How many replicas train on distinct data; what a mean over workers divides by."""
        return self.sizes.get(DATA, 1)

    def data_coordinate(self, rank: int) -> int:
        """Whose data a rank trains on."""
        return self.coordinates(rank).get(DATA, 0)

    def sharing_data(self, rank: int) -> list[int]:
        """The ranks that train on the same data as this one, itself among them; along no other axis there is one."""
        return [other for other in range(self.workers) if self.data_coordinate(other) == self.data_coordinate(rank)]

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Where a rank stands on every axis.

        Raises:
            ValueError: the mesh has no such rank.
        """
        if not 0 <= rank < self.workers:
            raise ValueError(f"mesh: no rank {rank} among {self.workers}")
        found = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return {axis.name: found[axis.name] for axis in self.axes}

    def members(self, name: str) -> list[list[int]]:
        """The ranks of every group along an axis, ascending.

        Raises:
            ValueError: no such axis.
        """
        if name not in self.sizes:
            raise ValueError(f"mesh: no axis {name!r}; there are {', '.join(self.sizes)}")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.workers):
            others = tuple(place for axis, place in self.coordinates(rank).items() if axis != name)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)
