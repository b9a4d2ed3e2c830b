"""The gradients of one dense group side by side in one flat tensor, so that they cross the workers in one exchange.

Behind them is room for the parcel's tail, so that both may travel as one tensor without a copy. The flags of use tell a
parameter that no rank used (its gradient stays None) from one that some did (the others count as zero).

A gradient that comes as rows is kept as rows where exchange and optimizer take them. Its place in the flat tensor is
then never written to, so a large table costs no memory and no pass over it.

Note [Kept gradients]. What a loop keeps of a `.grad` must stay as it was when the next backward writes into the bucket,
as by DDP's default. So `.grad` is a tensor of its own over the bucket's memory: torch counts who holds that memory.
When a backward finds somebody besides the parameters, it leaves the memory to them and takes other; from the second
backward in a row on it copies. Where nobody keeps a gradient nothing is copied. A gradient whose memory others see
before it is exchanged stays where it is, and gets the mean in place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.codecs.packing import all_finite
from armillary.plans.parcel import Layout, Parcel, Rows, gaps_of, without_gaps

__all__ = ["Bucket", "layout_beside", "other_form"]

PERSISTENT = 2  # backwards in a row, and a holder is taken for somebody who keeps gradients
ALONE = 2  # holders of the memory of a tensor that nobody else sees: itself, and the storage that asks


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
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.strides = [_strides(parameter) for parameter in self.parameters]
        self.own_strides = [parameter.stride() for parameter in self.parameters]  # until it is laid out anew
        self.is_kept = False  # somebody keeps gradients
        self._found_kept = 0  # backwards in a row that found a holder
        self._take_memory()
        self.waiting = set(range(len(self.parameters)))
        self.listable = {
            index
            for index, (name, view) in enumerate(zip(self.layout.names, self.views, strict=True))
            if name in listable and view.numel() and view.is_contiguous()
        }
        self.rows: dict[int, Rows] = {}  # of this backward, instead of what lies in the flat tensor
        self._written = set[int]()  # those of the listable that hold something in the flat tensor

    def _take_memory(self) -> None:
        first = self.parameters[0]
        self.flat = torch.zeros(self.layout.numel + self.layout.tail, dtype=first.dtype, device=first.device)
        self.values, self.room = self.flat.split_with_sizes((self.layout.numel, self.layout.tail))
        self.views = [
            self.values[begin:end].as_strided(shape, strides)
            for (begin, end), shape, strides in zip(self.layout.spans, self.shapes, self.strides, strict=True)
        ]
        self._storage = self.flat.untyped_storage()
        self._own_holders = _holders(self._storage)

    def leave_kept(self) -> None:
        """A backward begins whose gradients are shown to the user: those of earlier ones stay. See Note [Kept
        gradients]."""
        if self.is_kept:
            return
        holders = _holders(self._storage) - self._own_holders
        there = sum(self._lies_here(index) for index in range(len(self.parameters))) if holders else 0
        if holders <= there:
            self._found_kept = 0
            return
        # A thread of gloo's may hold what it has just sent a moment longer: that is no user, and does not last.
        self._found_kept += 1
        self.is_kept = self._found_kept == PERSISTENT
        self._take_memory()
        self._written = set(self.listable)

    def set_apart(self) -> None:
        """Gradients that lie here keep their memory, and the bucket takes other."""
        if any(map(self._lies_here, range(len(self.parameters)))):
            self._take_memory()
            self._written = set(self.listable)

    def _lies_here(self, index: int) -> bool:
        there = self.parameters[index].grad
        if there is None or there.layout != torch.strided:
            return False
        return there.numel() > 0 and there.data_ptr() == self.views[index].data_ptr()

    def refuse_cast(self, rank: int) -> None:
        """
        Raises:
            ValueError: a parameter has another dtype, device or shape than when the bucket was made.
        """
        kind = (self.flat.dtype, self.flat.device)
        for name, parameter, shape in zip(self.layout.names, self.parameters, self.shapes, strict=True):
            if (parameter.dtype, parameter.device) != kind or parameter.shape != shape:
                now = _text(parameter.shape, parameter.dtype, parameter.device)
                raise ValueError(f"rank {rank}: {other_form(name, now, _text(shape, *kind))}")

    def reset(self) -> None:
        """A backward begins: every parameter is waited for."""
        self.waiting = set(range(len(self.parameters)))
        self.rows = {}

    @property
    def is_ready(self) -> bool:
        return not self.waiting

    def deposit(self, index: int, scale: float, arrived: Tensor | None = None) -> bool:
        """Puts scale * gradient of that parameter in its place. Whether its `.grad` lies there too: not where somebody
        would see that.

        Args:
            arrived: what a backward that goes on has just brought, if any; it shares its memory with a new `.grad`.
        """
        parameter = self.parameters[index]
        there = parameter.grad
        assert there is not None
        self.put(index, there, scale)
        if index in self.rows or there.layout != torch.strided or there.requires_grad:
            parameter.grad = self._gradient(index, self.rows)
        elif not self.is_kept and not self._lies_here(index):
            is_dense = arrived is not None and arrived.layout == torch.strided
            is_new = arrived is not None and is_dense and arrived.data_ptr() == there.data_ptr()
            if is_new or _holders(there.untyped_storage()) == ALONE:
                self._lay(there, index)
        return self._lies_here(index)

    def _lay(self, gradient: Tensor, index: int) -> Tensor:
        """The tensor becomes one over that parameter's place."""
        view = self.views[index]
        with torch.no_grad():
            return gradient.set_(self._storage, view.storage_offset(), view.shape, view.stride())

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
            view, like = self.views[index], self.parameters[index]
            if self.is_kept or like.stride() != view.stride():  # fused optimizers walk in the order of memory
                # Not of the parameter: whoever watches how parameters are read would see one more reader.
                strides = self.strides[index] if like.stride() == self.own_strides[index] else _strides(like)
                own = torch.empty_strided(like.shape, strides, dtype=view.dtype, device=view.device)
                return own.copy_(view)
            return self._lay(view.new_empty(0), index)
        listed = rows[index]
        return torch.sparse_coo_tensor(
            listed.numbers[None], listed.values, self.parameters[index].shape, is_coalesced=True, check_invariants=False
        )

    def seal(self, scale: float, contributes: bool = True, mean_weight: float = 1.0) -> Parcel:
        """What is to be sent. Parameters that got no gradient in this backward count as what they hold, or zero; a
        rank that does not count uses none.

        Args:
            mean_weight: what all values are multiplied by besides, where it was not known when they were deposited.
        """
        used = [float(contributes)] * len(self.parameters)
        for index in sorted(self.waiting):
            if self.parameters[index].grad is None:
                self._zero(index)
                used[index] = 0.0
            else:  # gradients accumulated earlier without an exchange
                self.deposit(index, scale)
        if mean_weight != 1:
            self.rows = {index: replace(rows, values=rows.values * mean_weight) for index, rows in self.rows.items()}
            for index, view in enumerate(self.views):
                if index not in self.rows:
                    view.mul_(mean_weight)
        return self._parcel(used)

    def _zero(self, index: int) -> None:
        view = self.views[index]
        if index in self.listable:
            self._list(index, Rows(torch.empty(0, dtype=torch.int64, device=view.device), view[:0].clone()))
        else:
            view.zero_()

    def withdraw(self, result: Parcel) -> None:
        """Takes what the exchange gave: `.grad` of every parameter that some rank used becomes final."""
        used = set(self._used(result))
        for index, parameter in enumerate(self.parameters):
            if index in used:
                self._show(index, result.rows)
            else:
                parameter.grad = None

    def _show(self, index: int, rows: Mapping[int, Rows]) -> None:
        """`.grad` is final; the tensor that is there stays, if it can."""
        parameter = self.parameters[index]
        there = parameter.grad
        is_plain = there is not None and there.layout == torch.strided and not there.requires_grad
        if there is None or index in rows or not is_plain:
            parameter.grad = self._gradient(index, rows)
        elif not self._lies_here(index):
            there.copy_(self.views[index])
        elif there.stride() != parameter.stride():
            parameter.grad = self._gradient(index, rows)

    def means(self, result: Parcel) -> dict[nn.Parameter, Tensor]:
        """Takes what the exchange gave: of every parameter that some rank used, its final gradient."""
        return {self.parameters[index]: self._gradient(index, result.rows) for index in self._used(result)}

    def _used(self, result: Parcel) -> list[int]:
        """What the exchange gave is here; of which parameters some rank used it."""
        self._keep(result)
        self._written |= self.listable - result.rows.keys()
        return [index for index, used in enumerate(result.used.tolist()) if used > 0]

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


def other_form(name: str, now: str, before: str) -> str:
    """That a parameter was cast or replaced since the run began, with the remedy."""
    return (
        f"{name} is {now} and was {before} when the run began (model.float(), half() or to() since then?), so its "
        "gradients no longer cross; call run.close(), cast then, and begin a run anew"
    )


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _holders(storage: torch.UntypedStorage) -> int:
    """How many hold this memory: tensors, views of them, arrays, and the storage that asks."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's, where these leave no gap: fused optimizers walk over weight and gradient in the order of memory.
    Asked once, since whoever watches how parameters are read would see one more reader."""
    return torch.empty_like(parameter, device="meta").stride()
