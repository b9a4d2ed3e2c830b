"""A region of a model: where its activation is cut and joined, what draws there, and whether its ranks are alike."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from armillary.tensor.collectives import crossed, sum_backward
from armillary.tensor.dropout import base_seed, seeded
from armillary.tensor.groups import MeshAxis, TensorMesh
from armillary.tensor.ways import CutWay

__all__ = ["Region", "padded"]

ALIKE = 1e-4  # of two sums of one activation, relative to its size: other samples differ by more


class Region:
    """One region of one model. samples, tokens: of the whole activation that came last; tokens 0 where it has none."""

    def __init__(self, path: str, way: CutWay, mesh: TensorMesh, rows_dim: int, draws: bool) -> None:
        self.path, self.way, self.mesh, self.draws = path, way, mesh, draws
        self.rows_dim, self.tokens_dim = rows_dim, 1 - rows_dim
        self.samples = self.tokens = 0
        self._is_compared = self._is_stream_compared = mesh.is_dry
        self._copied: tuple[Tensor, int, Tensor] | None = None

    @property
    def tensor_axes(self) -> list[MeshAxis]:
        return self.mesh.over(self.way.axes)

    def entered(self, x: Tensor) -> Tensor:
        """(samples, tokens, features), whole -> this rank's piece."""
        self._compare(x)
        samples, tokens = x.shape[self.rows_dim], x.shape[self.tokens_dim] if x.dim() > 2 else 0
        self.samples, self.tokens = samples, tokens
        for got, names, what in ((samples, self.way.rows, "samples"), (tokens, self.way.tokens, "tokens")):
            if names and got < (many := self.mesh.pieces(names)):
                more = "larger batches" if what == "samples" else "longer sequences"
                raise ValueError(
                    f"tensor: want at least {many} {what} a replica in region {self.path!r}, one for each rank that "
                    f"cuts them, got {got}; take {more}"
                )
        return crossed(x, self.cut, lambda dy: self.joined(dy, samples, tokens)) if self.way.cuts_activations else x

    def left(self, x: Tensor) -> Tensor:
        samples, tokens = self.samples, self.tokens
        if not self.way.cuts_activations:
            return x
        return crossed(x, lambda x: self.joined(x, samples, tokens), lambda dy: self.cut(dy, is_gradient=True))

    def cut(self, x: Tensor, is_gradient: bool = False) -> Tensor:
        """What pads a gradient is nothing."""
        for names, dim in self._cuts():
            pieces = self.mesh.pieces(names)
            if dim != -1:
                x = padded(x, dim, -(-x.shape[dim] // pieces) * pieces, is_gradient)
            x = self.mesh.piece(x, names, dim)
        return x.contiguous()

    def joined(self, x: Tensor, samples: int, tokens: int) -> Tensor:
        for names, dim in reversed(self._cuts()):
            x = self.mesh.joined(x, names, dim)
        x = x.narrow(self.rows_dim, 0, samples)
        return x.narrow(self.tokens_dim, 0, tokens) if self.way.tokens else x

    def _cuts(self) -> list[tuple[tuple[str, ...], int]]:
        found = [(self.way.rows, self.rows_dim), (self.way.tokens, self.tokens_dim), (self.way.features, -1)]
        return [(names, dim) for names, dim in found if names]

    def copied(self, x: Tensor) -> Tensor:
        """The input of column linears; those that read one tensor share the sum of its gradient."""
        if self._copied is not None and self._copied[0] is x and self._copied[1] == x._version:
            return self._copied[2]
        found = sum_backward(x, self.tensor_axes)
        if torch.is_grad_enabled():
            self._copied = (x, x._version, found)
        return found

    def forget_copied(self) -> None:
        self._copied = None

    def seeded(self, device: torch.device, is_whole: bool) -> AbstractContextManager[None]:
        """For what draws on a piece, or on an activation that all ranks of a replica hold alike."""
        if self.mesh.is_dry:
            return nullcontext()
        base = base_seed()
        if not self._is_stream_compared:
            self._is_stream_compared = True
            self._refuse_apart(float(base % (1 << 50)), 0.0, "random streams")
        piece = self.mesh.piece_index(("data", *(() if is_whole else self.way.axes)))
        return seeded(base, piece, device)

    def _compare(self, x: Tensor) -> None:
        """Once: ranks of a replica must be given the same samples."""
        if self._is_compared:
            return
        self._is_compared = True
        x = x.detach().double()
        self._refuse_apart(float(x.sum()), ALIKE * float(x.abs().sum()), "batches")
        if self.draws:
            state = torch.get_rng_state().double()
            self._refuse_apart(float(state @ torch.arange(len(state)).double()), 0.0, "random streams")

    def _refuse_apart(self, number: float, by: float, what: str) -> None:
        """Every rank of the replica finds the same, whichever axes they differ along."""
        low = high = number
        for axis in self.tensor_axes:
            lows, highs, allowed = zip(*axis.everyones([low, high, by]), strict=True)
            low, high, by = min(lows), max(highs), max(allowed)
        if high - low > by:
            raise ValueError(
                f"tensor: ranks of one replica have different {what}; choose data and seeds by part.data_rank of "
                "part.replicas, not by the rank of the job"
            )


def padded(x: Tensor, dim: int, length: int, with_zeros: bool = False) -> Tensor:
    """Grown to `length` along `dim` by copies of its last piece, whose values do no harm, or by zeros."""
    lacking = length - x.shape[dim]
    if not lacking:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    more = last.expand(*(lacking if one == dim % x.dim() else -1 for one in range(x.dim())))
    return torch.cat([x, torch.zeros_like(more) if with_zeros else more], dim)
