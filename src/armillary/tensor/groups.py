"""The collectives of this room: the only file here that calls torch.distributed, or holds a group.

A mesh has named axes, the data axis first. An axis is the group of the ranks that differ along it alone. What each of
its collectives sends is counted, so that a forecast can be laid beside it. A scatter-sum is an all-to-all and a local
sum: gloo's own reduce-scatter is an all-reduce.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = [
    "Later",
    "MeshAxis",
    "ParameterCut",
    "TensorMesh",
    "is_rank_0",
    "like",
    "local_norms",
    "open_mesh",
    "plain",
    "ranks",
    "shared",
]

Later = Callable[[], Tensor]  # waits for what is under way


def ranks() -> int:
    """How many the job has; 0 where none is joined."""
    return dist.get_world_size() if dist.is_initialized() else 0


def is_rank_0() -> bool:
    return dist.get_rank() == 0


def _later(work: Any, found: Later) -> Later:
    def ended() -> Tensor:
        work.wait()
        return found()

    return ended


class MeshAxis:
    """One axis of a mesh, as this rank sees it. Copies of a model share it."""

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes = 0.0

    def __deepcopy__(self, memo: Any) -> "MeshAxis":
        return self

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
        self._count(2 * (self.size - 1) / self.size, x)
        return _later(dist.all_reduce(x, group=self.group, async_op=True), lambda: x)

    def gathering(self, x: Tensor, dim: int) -> Later:
        """As `gather`, under way until it is asked for."""
        if self.size == 1:
            return lambda: x
        x = x.detach().contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        self._count(self.size - 1, x)
        return _later(dist.all_gather(found, x, group=self.group, async_op=True), lambda: torch.cat(found, dim))

    def scatter_summing(self, x: Tensor, dim: int) -> Later:
        """This rank's piece, along `dim`, of the sum; under way until it is asked for."""
        if self.size == 1:
            return lambda: x
        arriving = self._exchanging(x, dim)
        return lambda: arriving().sum(0)

    def shift(self, x: Tensor) -> Tensor:
        """What the rank before sent; this rank's goes to the next."""
        x, found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        at = dist.get_process_group_ranks(self.group)
        after, before = at[(self.index + 1) % self.size], at[self.index - 1]
        self._count(1, x)
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
        self._count((self.size - 1) / self.size, leaving)
        work = dist.all_to_all_single(arriving, leaving, group=self.group, async_op=True)
        return _later(work, lambda: arriving)

    def _count(self, times: float, x: Tensor) -> None:
        self.sent_bytes += times * x.numel() * x.element_size()


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
    """The axes of this rank by name, and torch's DeviceMesh behind them."""

    def __init__(self, device_mesh: Any) -> None:
        names = device_mesh.mesh_dim_names
        self.device_mesh = device_mesh
        self.axes = {name: MeshAxis(name, device_mesh[name].get_group()) for name in names}

    def __deepcopy__(self, memo: Any) -> "TensorMesh":
        return self

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
        x = whole.unflatten(0, (placement.fused, -1)) if whole.dim() else whole
        for dim, names in enumerate(placement.cuts):
            x = self.piece(x, names, dim + 1)
        return x.flatten(0, 1).clone() if whole.dim() else x.clone()

    def whole(self, local: Tensor, placement: ParameterCut) -> Tensor:
        """Collective: the parameter on every rank."""
        x = local.unflatten(0, (placement.fused, -1)) if local.dim() else local
        for dim, names in enumerate(placement.cuts):
            x = self.joined(x, names, dim + 1)
        return x.flatten(0, 1) if local.dim() else x

    @property
    def sent_bytes(self) -> float:
        """By this rank, by all collectives of all axes so far."""
        return sum(axis.sent_bytes for axis in self.axes.values())


def open_mesh(sizes: Mapping[str, int], device: str) -> TensorMesh:
    """Collective over all ranks of the job, whose number is the product of the sizes."""
    return TensorMesh(init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


def shared(mine: Any) -> list[Any]:
    """Collective over the job: everyone's, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
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
