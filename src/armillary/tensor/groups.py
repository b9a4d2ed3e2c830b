"""The collectives of this room: the only file here that calls torch.distributed, or holds a group.

A mesh has named axes, the data axis first. An axis is the group of the ranks that differ along it alone. What is asked
of it is counted, so that a forecast can be laid beside it. The axes of a dry mesh send nothing: what comes back has the
right shape, and they count. A scatter-sum is an all-to-all and a local sum: gloo's own reduce-scatter is an all-reduce.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = [
    "AxisRequest",
    "Later",
    "MeshAxis",
    "ParameterCut",
    "TensorMesh",
    "by_rank_0",
    "dry_mesh",
    "is_rank_0",
    "like",
    "local_norms",
    "open_mesh",
    "plain",
    "ranks",
    "shared",
]

Later = Callable[[], Tensor]  # waits for what is under way
T = TypeVar("T")


class AxisRequest(NamedTuple):
    """A collective, and the bytes that each rank gives to it."""

    kind: str
    given_bytes: float

    def sent_bytes(self, ranks: int) -> float:
        """That each of so many ranks sends."""
        return SENDS[self.kind](ranks) * self.given_bytes


SENDS: Mapping[str, Callable[[int], float]] = {
    "AllReduce": lambda n: 2 * (n - 1) / n,
    "AllGather": lambda n: n - 1,
    "AllToAll": lambda n: (n - 1) / n,
    "Shift": lambda n: 1,
}


def ranks() -> int:
    """How many the job has; 0 where none is joined."""
    return dist.get_world_size() if dist.is_initialized() else 0


def is_rank_0() -> bool:
    return dist.get_rank() == 0


class MeshAxis:
    """One axis of a mesh, as this rank sees it. Copies of a model share it.

    Args:
        group: None where nothing is sent.
    """

    def __init__(self, name: str, size: int, index: int, group: Any) -> None:
        self.name, self.size, self.index, self.group = name, size, index, group
        self.requests = Counter[AxisRequest]()

    def __deepcopy__(self, memo: Any) -> "MeshAxis":
        return self

    @property
    def sent_bytes(self) -> float:
        return sum(times * one.sent_bytes(self.size) for one, times in self.requests.items())

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce; a new tensor."""
        return self.summing(x)()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Pieces of one shape, joined along `dim`."""
        return self.gathering(x, dim)()

    def all_to_all(self, x: Tensor, split: int, into: int) -> Tensor:
        """Cut along `split`, sent, joined along `into`."""
        return x if self.size == 1 else torch.cat(list(self._exchanging(x, split)()), into)

    def summing(self, x: Tensor) -> Later:
        """As `sum`, under way until it is asked for."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return lambda: x
        return _later(self._asked("AllReduce", x, dist.all_reduce, x), lambda: x)

    def gathering(self, x: Tensor, dim: int) -> Later:
        """As `gather`, under way until it is asked for."""
        if self.size == 1:
            return lambda: x
        x = x.detach().contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        return _later(self._asked("AllGather", x, dist.all_gather, found, x), lambda: torch.cat(found, dim))

    def scatter_summing(self, x: Tensor, dim: int) -> Later:
        """This rank's piece, along `dim`, of the sum; under way until it is asked for."""
        if self.size == 1:
            return lambda: x
        arriving = self._exchanging(x, dim)
        return lambda: arriving().sum(0)

    def shift(self, x: Tensor) -> Tensor:
        """What the rank before sent; this rank's goes to the next."""
        if self.size == 1:
            return x
        x, found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self._count("Shift", x)
        if self.group is not None:
            at = dist.get_process_group_ranks(self.group)
            after, before = at[(self.index + 1) % self.size], at[self.index - 1]
            arriving = dist.irecv(found, before, group=self.group)  # first: gloo moves nothing before it is asked for
            leaving = dist.isend(x, after, group=self.group)
            for one in (leaving, arriving):
                if one is not None:
                    one.wait()
        return found

    def everyones(self, numbers: Sequence[float]) -> list[list[float]]:
        """By rank; not counted."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        return [one.tolist() for one in found]

    def _exchanging(self, x: Tensor, dim: int) -> Later:
        leaving = torch.stack(x.detach().chunk(self.size, dim))
        arriving = torch.empty_like(leaving)
        return _later(self._asked("AllToAll", leaving, dist.all_to_all_single, arriving, leaving), lambda: arriving)

    def _asked(self, kind: str, given: Tensor, collective: Callable[..., Any], *tensors: Any) -> Any:
        """The work under way; None where nothing is sent."""
        self._count(kind, given)
        return None if self.group is None else collective(*tensors, group=self.group, async_op=True)

    def _count(self, kind: str, given: Tensor) -> None:
        self.requests[AxisRequest(kind, given.numel() * given.element_size())] += 1


def _later(work: Any, found: Later) -> Later:
    def ended() -> Tensor:
        if work is not None:
            work.wait()
        return found()

    return ended


@dataclass(frozen=True)
class ParameterCut:
    """Which axes cut a parameter: for each dimension their names, outermost first; none where it lies whole.

    Args of note:
        fused: so many matrices stand one below the other in dimension 0, and each is cut alike.
    """

    cuts: tuple[tuple[str, ...], ...]
    fused: int = 1

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(name for one in self.cuts for name in one)


class TensorMesh:
    """The axes of this rank by name, and torch's DeviceMesh behind them; None where nothing is sent."""

    def __init__(self, axes: Sequence[MeshAxis], device_mesh: Any = None) -> None:
        self.axes, self.device_mesh = {axis.name: axis for axis in axes}, device_mesh

    def __deepcopy__(self, memo: Any) -> "TensorMesh":
        return self

    @property
    def is_dry(self) -> bool:
        return self.device_mesh is None

    @property
    def sent_bytes(self) -> float:
        """By this rank, by all collectives of all axes so far."""
        return sum(axis.sent_bytes for axis in self.axes.values())

    def close(self) -> None:
        for axis in self.axes.values():
            if axis.group is not dist.group.WORLD:
                dist.destroy_process_group(axis.group)

    def over(self, names: Sequence[str]) -> list[MeshAxis]:
        return [self.axes[name] for name in names]

    def pieces(self, names: Sequence[str]) -> int:
        return math.prod(axis.size for axis in self.over(names))

    def piece_index(self, names: Sequence[str]) -> int:
        """Of this rank's piece, where the axes cut outermost first."""
        found = 0
        for axis in self.over(names):
            found = found * axis.size + axis.index
        return found

    def piece(self, x: Tensor, names: Sequence[str], dim: int) -> Tensor:
        return x if not names else x.chunk(self.pieces(names), dim)[self.piece_index(names)]

    def joined(self, x: Tensor, names: Sequence[str], dim: int) -> Tensor:
        for axis in reversed(self.over(names)):
            x = axis.gather(x, dim)
        return x

    def local(self, whole: Tensor, placement: ParameterCut) -> Tensor:
        """This rank's piece of a parameter; a copy."""
        return self._by_dimension(self.piece, whole, placement).clone()

    def whole(self, local: Tensor, placement: ParameterCut) -> Tensor:
        """Collective: the parameter on every rank."""
        return self._by_dimension(self.joined, local, placement)

    def _by_dimension(self, made: Callable[..., Tensor], x: Tensor, placement: ParameterCut) -> Tensor:
        if not x.dim():
            return x
        x = x.unflatten(0, (placement.fused, -1))
        for dim, names in enumerate(placement.cuts):
            x = made(x, names, dim + 1)
        return x.flatten(0, 1)


def open_mesh(sizes: Mapping[str, int], device: str) -> TensorMesh:
    """Collective over all ranks of the job, whose number is the product of the sizes."""
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = {name: mesh[name].get_group() for name in sizes}
    return TensorMesh(
        [MeshAxis(name, size, dist.get_rank(groups[name]), groups[name]) for name, size in sizes.items()], mesh
    )


def dry_mesh(sizes: Mapping[str, int]) -> TensorMesh:
    """That of the first rank, which sends nothing."""
    return TensorMesh([MeshAxis(name, size, 0, None) for name, size in sizes.items()])


def shared(mine: Any) -> list[Any]:
    """Collective over the job: everyone's, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def by_rank_0(work: Callable[[], T]) -> T:
    """Collective over the job: what rank 0 makes, on every rank; so is what it raises."""
    made: list[Any] = [None, None]
    if is_rank_0():
        try:
            made[0] = work()
        except Exception as error:
            made[1] = error
    dist.broadcast_object_list(made, 0)
    if made[1] is not None:
        raise made[1]
    found: T = made[0]
    return found


def plain(x: Tensor) -> Tensor:
    """Collective where FSDP spreads it: the tensor as it is without FSDP."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(piece: Tensor, model: Tensor) -> Tensor:
    """Collective where FSDP spreads `model`: the piece, spread alike."""
    if not isinstance(model, DTensor):
        return piece
    return distribute_tensor(piece.to(model.device), model.device_mesh, model.placements)


def local_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Collective where FSDP or a table spreads them: the square of their norm, as this rank's pieces have it."""
    found = [plain(torch.linalg.vector_norm(one)) for one in gradients]
    return torch.stack([one.double() ** 2 for one in found]).sum()
