"""The gradients of one dense group side by side in one flat tensor, so that they cross the workers in one exchange.

Behind them is room for the parcel's tail, so that both may travel as one tensor without a copy. The flags of use tell a
parameter that no rank used (its gradient stays None) from one that some did (the others count as zero).

A gradient that comes as rows is kept as rows where exchange and optimizer take them. Its place in the flat tensor is
then never written to, so a large table costs no memory and no pass over it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.codecs.finite import all_finite
from armillary.exchanges.parcel import Parcel, Rows
from armillary.exchanges.residual import gaps_of, without_gaps
from armillary.facts.layout import Layout

__all__ = ["Bucket", "layout_beside"]


def layout_beside(
    parameters: Sequence[nn.Parameter], names: Sequence[str] = (), align: int = 1, is_guarded: bool = False
) -> Layout:
    """That of these parameters, all of one dtype; by number where they have no names."""
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    return Layout(tuple(names) or tuple(map(str, range(len(shapes)))), shapes, dtype, align, is_guarded)


class Bucket:
    """Begins a backward empty (`reset`), takes each gradient as it appears (`deposit`, `put`), gives back the mean
    (`withdraw`, `means`). Of a group that exchanges weights it takes those instead (`weigh_in`, `weigh_out`).

    listable: names of parameters whose gradients may be kept as rows."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: Layout | None = None, listable: Collection[str] = ()
    ):
        self.parameters = list(parameters)
        self.layout = layout or layout_beside(self.parameters)
        first = self.parameters[0]
        self.flat = torch.zeros(self.layout.numel + self.layout.tail, dtype=first.dtype, device=first.device)
        self.values, self.room = self.flat.split_with_sizes((self.layout.numel, self.layout.tail))
        pieces = [self.values[begin:end] for begin, end in self.layout.spans]
        self.views = [_laid_out_as(p, piece) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.waiting = set(range(len(self.parameters)))
        self.listable = {
            index
            for index, (name, view) in enumerate(zip(self.layout.names, self.views, strict=True))
            if name in listable and view.numel() and view.is_contiguous()
        }
        self.rows: dict[int, Rows] = {}  # of this backward, instead of what lies in the flat tensor
        self._written = set[int]()  # those of the listable that hold something in the flat tensor

    def reset(self) -> None:
        """A backward begins: every parameter is waited for."""
        self.waiting = set(range(len(self.parameters)))
        self.rows = {}

    @property
    def is_ready(self) -> bool:
        return not self.waiting

    def deposit(self, index: int, scale: float) -> None:
        """Puts scale * gradient of that parameter in its place; its `.grad` becomes the view."""
        parameter = self.parameters[index]
        assert parameter.grad is not None
        self.put(index, parameter.grad, scale)
        parameter.grad = self._gradient(index, self.rows)

    def put(self, index: int, gradient: Tensor, scale: float) -> None:
        """Puts scale * gradient in that parameter's place."""
        view = self.views[index]
        self.waiting.discard(index)
        if gradient.is_sparse and gradient.sparse_dim() == 1 and index in self.listable:
            found = gradient.detach().coalesce()
            self._list(index, Rows(found.indices()[0], found.values() * scale))
            return
        self._unlist(index)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.data_ptr() != view.data_ptr():
            torch.mul(gradient.detach(), scale, out=view)
        elif scale != 1:
            view.mul_(scale)

    @property
    def own(self) -> list[Tensor]:
        """What this rank holds of every parameter."""
        return [self.rows[index].values if index in self.rows else view for index, view in enumerate(self.views)]

    def _list(self, index: int, rows: Rows) -> None:
        if index in self._written:
            self.views[index].zero_()
            self._written.discard(index)
        self.rows[index] = rows

    def _unlist(self, index: int) -> None:
        """It goes in its place in the flat tensor."""
        self.rows.pop(index, None)
        if index in self.listable:
            self._written.add(index)

    def _gradient(self, index: int, rows: Mapping[int, Rows]) -> Tensor:
        if index not in rows:
            return self.views[index]
        listed = rows[index]
        return torch.sparse_coo_tensor(
            listed.numbers[None], listed.values, self.parameters[index].shape, is_coalesced=True, check_invariants=False
        )

    def seal(self, scale: float, counts: bool = True, part: float = 1.0) -> Parcel:
        """What is to be sent. Parameters that got no gradient in this backward count as what they hold, or zero; a
        rank that does not count uses none.

        Args:
            part: what all values are multiplied by besides, where it was not known when they were deposited.
        """
        used = [float(counts)] * len(self.parameters)
        for index in sorted(self.waiting):
            if self.parameters[index].grad is None:
                self._zero(index)
                used[index] = 0.0
            else:  # gradients accumulated earlier without an exchange
                self.deposit(index, scale)
        if part != 1:
            self.rows = {index: replace(rows, values=rows.values * part) for index, rows in self.rows.items()}
            for index, view in enumerate(self.views):
                if index not in self.rows:
                    view.mul_(part)
        return self._parcel(used)

    def _zero(self, index: int) -> None:
        view = self.views[index]
        if index in self.listable:
            self._list(index, Rows(torch.empty(0, dtype=torch.int64, device=view.device), view[:0].clone()))
        else:
            view.zero_()

    def withdraw(self, result: Parcel) -> None:
        """Takes what the exchange gave: `.grad` of every parameter that some rank used becomes final."""
        means = self.means(result)
        for parameter in self.parameters:
            parameter.grad = means.get(parameter)

    def means(self, result: Parcel) -> dict[nn.Parameter, Tensor]:
        """Takes what the exchange gave: of every parameter that some rank used, its final gradient."""
        self._keep(result)
        self._written |= self.listable - result.rows.keys()
        kept = enumerate(zip(self.parameters, result.used.tolist(), strict=True))
        return {parameter: self._gradient(index, result.rows) for index, (parameter, used) in kept if used > 0}

    def weigh_in(self) -> Parcel:
        """The weights, to be sent."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            view.copy_(parameter)
        return self._parcel([1.0] * len(self.parameters))

    def weigh_out(self, result: Parcel) -> None:
        """What the exchange gave takes the weights' place."""
        self._keep(result)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.copy_(view)

    def _parcel(self, used: list[float]) -> Parcel:
        is_sick = self.layout.is_guarded and not bool(all_finite(self.values))
        tail = torch.tensor([*used, float(is_sick)] if self.layout.is_guarded else used, dtype=torch.float64)
        self.room.copy_(tail)
        return Parcel(self.values, tail, self.layout, self.flat, rows=self.rows)

    def _keep(self, result: Parcel) -> None:
        """Between tensors stay zeros, whatever an exchange makes of them."""
        if result.values.data_ptr() == self.flat.data_ptr():
            without_gaps(self.values, gaps_of(self.layout))
            return
        for begin, end in self.layout.spans if self.layout.align > 1 else [(0, self.layout.numel)]:
            self.values[begin:end] = result.values[begin:end]


def _laid_out_as(parameter: Tensor, piece: Tensor) -> Tensor:
    """The flat piece in the parameter's shape, and in its strides where these leave no gap: fused optimizers walk over
    weight and gradient in the order of memory."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides)
