"""One group of all workers at once, as its exchange's oracle joins them: gradients in, gradients out, states kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.parcel import Parcel, State
from armillary.exchanges.rank_info import RankInfo
from armillary.facts.layout import Layout

__all__ = ["Crossing", "flat", "lying_as"]


def lying_as(like: Tensor, piece: Tensor) -> Tensor:
    """A piece of a flat tensor in that shape, and in the order in which such a tensor lies in memory."""
    return piece.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), piece.storage_offset())


def flat(layout: Layout, tensors: Sequence[Tensor | None]) -> Tensor:
    """Side by side; zeros for what there is not."""
    values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
    for tensor, (begin, end) in zip(tensors, layout.spans, strict=True):
        if tensor is not None:
            lying_as(tensor, values[begin:end]).copy_(tensor)
    return values


@dataclass(eq=False)
class Crossing:
    """
    Args:
        members: the parameters, with the values that training begins with. states: by worker.
    """

    names: tuple[str, ...]
    members: Sequence[nn.Parameter]
    exchange: DenseExchange
    workers: int
    states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        dtype, shapes = str(self.members[0].dtype).removeprefix("torch."), tuple(tuple(p.shape) for p in self.members)
        self.layout = Layout(self.names, shapes, dtype, self.exchange.align, self.exchange.is_guarded)
        weights = flat(self.layout, [one.detach() for one in self.members])
        places = [RankInfo(worker, self.workers) for worker in range(self.workers)]
        self.states = [self.exchange.begin(self.layout, place, weights) for place in places]

    def mean(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """By worker and parameter -> the mean that all get; None for a parameter that nobody used.

        A state stays as it was where some worker's numbers are not finite, and for what nobody used.
        """
        layout, parcels = self.layout, []
        for theirs in gradients:
            values = flat(layout, [None if one is None else one * (1.0 / self.workers) for one in theirs])
            tail = [float(one is not None) for one in theirs]
            tail += [float(not bool(values.isfinite().all()))] * layout.is_guarded
            parcels.append(Parcel(values, torch.tensor(tail, dtype=torch.float64), layout))
        results, after = self.exchange.oracle(parcels, self.states)
        is_sick = any(parcel.sick for parcel in parcels)
        is_used = [any(theirs[number] is not None for theirs in gradients) for number in range(len(layout.names))]
        for was, state in zip(self.states, after, strict=True):
            for number, used in enumerate(is_used):
                for entry, value in state.items() if is_sick or not used else ():
                    begin, end = self.exchange.span(entry, layout, number)
                    value[begin:end] = was[entry][begin:end]
        self.states = after
        found: list[Tensor | None] = []
        for used, like, (begin, end) in zip(is_used, self.members, layout.spans, strict=True):
            mean = lying_as(like, results[0].values[begin:end].clone())
            found.append((torch.full_like(mean, float("nan")) if is_sick else mean) if used else None)
        return found
