"""The truth of a plan that is not exact: N models and N optimizers in one process, joined by what exchanges mean.

A group's exchange says what N workers end up with (`oracle`), states included; everything else is a plain loop. No
request is made and no runtime is imported, so it cannot share their faults. What no group holds is averaged exactly.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.parcel import Parcel, State
from armillary.exchanges.place import Place
from armillary.facts.layout import Layout

__all__ = ["Replicas", "Shared"]

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


class Shared(NamedTuple):
    """Parameters that cross the workers together, by name, and how."""

    parameters: tuple[str, ...]
    exchange: DenseExchange


class Replicas:
    """`models` and `optimizers`, one of each per worker; `states` of every group, by group and worker."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        workers: int,
        groups: Sequence[Shared],
    ):
        """
        Args:
            model: with the values that training begins with; it is copied.
        """
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.optimizers = [optimizer(one) for one in self.models]
        self.groups, self.steps = list(groups), 0
        self.named = [{n: p for n, p in one.named_parameters() if p.requires_grad} for one in self.models]
        self.layouts = [self._layout(group) for group in self.groups]
        self.states: list[list[State]] = []
        for group, layout in zip(self.groups, self.layouts, strict=True):
            weights = _flat(layout, [self.named[0][name].detach() for name in layout.names])
            self.states.append([group.exchange.begin(layout, Place(w, workers), weights) for w in range(workers)])

    def _layout(self, group: Shared) -> Layout:
        members = [self.named[0][name] for name in group.parameters]
        dtype, shapes = str(members[0].dtype).removeprefix("torch."), tuple(tuple(p.shape) for p in members)
        return Layout(group.parameters, shapes, dtype, group.exchange.align, group.exchange.is_guarded)

    def step(
        self,
        batches: Sequence[Batch],
        loss: Loss,
        weights: Sequence[float] | None = None,
        before_step: Callable[[nn.Module], object] | None = None,
    ) -> list[float]:
        """One training step over `batches`, one per worker; returns each worker's loss. Arguments as in `serial`."""
        workers, losses = len(self.models), []
        total = sum(weights) if weights is not None else 0.0
        parts = [1.0 / workers] * workers if weights is None else [weight / (total or 1.0) for weight in weights]
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, batch)
            value.backward()
            losses.append(float(value.detach()))
        with torch.no_grad():
            for number, group in enumerate(self.groups):
                if group.exchange.carries == "gradient" and group.exchange.due(self.steps + 1):
                    self._exchange_gradients(number, parts)
            self._average_the_rest(parts)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if before_step is not None:
                before_step(model)
            optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for number, group in enumerate(self.groups):
                if group.exchange.carries == "weights" and group.exchange.due(self.steps):
                    self._exchange_weights(number)
        return losses

    def consensus(self) -> dict[str, Tensor]:
        """The mean of the replicas, in the order of workers."""
        found = {}
        for name in self.named[0]:
            total = self.named[0][name].detach().clone()
            for named in self.named[1:]:
                total += named[name].detach()
            found[name] = total / len(self.models)
        return found

    def _exchange_gradients(self, number: int, parts: Sequence[float]) -> None:
        layout, parcels = self.layouts[number], []
        for named, part in zip(self.named, parts, strict=True):
            gradients = [named[name].grad for name in layout.names]
            values = [None if gradient is None else gradient.to_dense() * part for gradient in gradients]
            parcels.append(_parcel(layout, values))
        for worker, result in enumerate(self._moved(number, parcels)):
            is_sick = any(float(parcel.sick) for parcel in parcels)
            for place, (name, (begin, end)) in enumerate(zip(layout.names, layout.spans, strict=True)):
                parameter = self.named[worker][name]
                mean = _as(parameter, result.values[begin:end].clone())
                mean = torch.full_like(mean, float("nan")) if is_sick else mean
                parameter.grad = mean if any(float(parcel.used[place]) for parcel in parcels) else None

    def _exchange_weights(self, number: int) -> None:
        layout = self.layouts[number]
        parcels = [_parcel(layout, [named[name].detach() for name in layout.names]) for named in self.named]
        results = self._moved(number, parcels)
        if any(float(parcel.sick) for parcel in parcels):
            return
        for named, result in zip(self.named, results, strict=True):
            for name, (begin, end) in zip(layout.names, layout.spans, strict=True):
                named[name].copy_(_as(named[name], result.values[begin:end]))

    def _moved(self, number: int, parcels: list[Parcel]) -> list[Parcel]:
        """The results; states go on, but for what may not: of a sick step, and of what nobody used."""
        layout, before = self.layouts[number], self.states[number]
        results, after = self.groups[number].exchange.oracle(parcels, before)
        if any(float(parcel.sick) for parcel in parcels):
            return results
        for was, state in zip(before, after, strict=True):
            for place in range(len(layout.names)):
                if not any(float(parcel.used[place]) for parcel in parcels):
                    for entry, value in state.items():
                        begin, end = self.groups[number].exchange.span(entry, layout, place)
                        value[begin:end] = was[entry][begin:end]
        self.states[number] = after
        return results

    def _average_the_rest(self, parts: Sequence[float]) -> None:
        shared = {name for group in self.groups for name in group.parameters}
        for name in self.named[0].keys() - shared:
            gradients = [named[name].grad for named in self.named]
            there = [g.to_dense() * part for g, part in zip(gradients, parts, strict=True) if g is not None]
            for named in self.named:
                named[name].grad = torch.stack(there).sum(0) if there else None


def _flat(layout: Layout, tensors: Sequence[Tensor | None]) -> Tensor:
    values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
    for tensor, (begin, end) in zip(tensors, layout.spans, strict=True):
        if tensor is not None:
            _as(tensor, values[begin:end]).copy_(tensor)
    return values


def _as(like: Tensor, piece: Tensor) -> Tensor:
    """A piece of a flat tensor in that shape, and in the order in which such a tensor lies in memory."""
    return piece.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), piece.storage_offset())


def _parcel(layout: Layout, tensors: Sequence[Tensor | None]) -> Parcel:
    values = _flat(layout, tensors)
    tail = [float(tensor is not None) for tensor in tensors]
    if layout.is_guarded:
        tail.append(float(not bool(values.isfinite().all())))
    return Parcel(values, torch.tensor(tail, dtype=torch.float64), layout)
