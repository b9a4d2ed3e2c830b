"""The truth of a plan that is not exact: N models and N optimizers in one process, joined by what exchanges mean.

A group's exchange says what N workers end up with (`oracle`), states included; everything else is a plain loop. No
request is made and no runtime is imported, so it cannot share their faults. What no group holds is averaged exactly.
Where exchanges keep all workers' weights alike, one model and one optimizer stand for all.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.dense import DenseExchange, Meeting
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.reference.serial import CodedReads, Meanings

__all__ = ["Answer", "Replicas", "SharedGroup", "by_oracle"]

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Gradients = Sequence[dict[str, Tensor | None]]  # by worker and name
Answer = Callable[[DenseExchange, Sequence[Parcel], Sequence[State]], tuple[list[Parcel], list[State]]]


NO_ROWS: Mapping[str, Meanings] = MappingProxyType({})


class SharedGroup(NamedTuple):
    """Parameters that cross the workers together, by name, and how."""

    parameters: tuple[str, ...]
    exchange: DenseExchange


def by_oracle(
    exchange: DenseExchange, parcels: Sequence[Parcel], states: Sequence[State]
) -> tuple[list[Parcel], list[State]]:
    """What all workers get of their parcels, and their next states, as the exchange says of itself."""
    return exchange.oracle(parcels, states)


class Replicas:
    """`models`, one per worker, or one and the same for all; `optimizers`, one per model that there is; `states` of
    every group, by group and worker."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        workers: int,
        groups: Sequence[SharedGroup],
        answer: Answer = by_oracle,
        rows: Mapping[str, Meanings] = NO_ROWS,
        workers_per_node: int = 1,
    ):
        """
        Args:
            model: with the values that training begins with; it is copied.
            rows: what is read of tables whose rows are coded, by name; they are in no group.
            answer: who says what exchanges give; their oracles, if nothing else is said.
        """
        are_alike = all(group.exchange.keeps_replicas_alike for group in groups)
        copies = [copy.deepcopy(model) for _ in range(1 if are_alike else workers)]
        self.models = copies * (workers if are_alike else 1)
        self.optimizers = [optimizer(one) for one in copies]
        self.groups, self.steps, self.answer, self.rows = list(groups), 0, answer, rows
        self.workers_per_node = workers_per_node
        self.named = [{n: p for n, p in one.named_parameters() if p.requires_grad} for one in self.models]
        self.layouts = [self._layout(group) for group in self.groups]
        self.states: list[list[State]] = []
        for group, layout in zip(self.groups, self.layouts, strict=True):
            weights = _flat(layout, [self.named[0][name].detach() for name in layout.names])
            self.states.append([group.exchange.begin(layout, RankInfo(w, workers), weights) for w in range(workers)])

    def _layout(self, group: SharedGroup) -> Layout:
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
        workers, losses, gradients = len(self.models), [], list[dict[str, Tensor | None]]()
        total = sum(weights) if weights is not None else 0.0
        parts = [1.0 / workers] * workers if weights is None else [weight / (total or 1.0) for weight in weights]
        for model, named, batch, part in zip(self.models, self.named, batches, parts, strict=True):
            model.zero_grad(set_to_none=True)
            with CodedReads({named[name]: meanings for name, meanings in self.rows.items()}, part):
                value = loss(model, batch)
            value.backward()
            losses.append(float(value.detach()))
            gradients.append({name: parameter.grad for name, parameter in named.items()})
        with torch.no_grad():
            parcels = {
                number: self._parcels(number, gradients, parts)
                for number, group in enumerate(self.groups)
                if group.exchange.carries == "gradient" and group.exchange.due(self.steps + 1)
            }
            is_nonfinite = any(float(parcel.nonfinite) for given in parcels.values() for parcel in given)
            for number, given in parcels.items():
                self._exchange_gradients(number, given, is_nonfinite and self.layouts[number].is_guarded)
            self._average_beside(gradients)
            self._average_the_rest(gradients, parts)
        self._meet("before")
        for model, optimizer in zip(self.models, self.optimizers, strict=False):
            if before_step is not None:
                before_step(model)
            optimizer.step()
        self.steps += 1
        self._meet("after")
        return losses

    @torch.no_grad()
    def _meet(self, meeting: Meeting) -> None:
        """Weights are exchanged that meet then in the step under way."""
        for number, group in enumerate(self.groups):
            steps = self.steps + (meeting == "before")
            if group.exchange.carries == "weights" and group.exchange.meeting == meeting and group.exchange.due(steps):
                self._exchange_weights(number)

    def consensus(self) -> dict[str, Tensor]:
        """The mean of the replicas, in the order of workers; where all have one number, that."""
        return {name: _mean([named[name].detach() for named in self.named]) for name in self.named[0]}

    def buffers(self) -> dict[str, Tensor]:
        """What the mean model has of buffers: means of those that float, of whole numbers the largest."""
        everyones = [dict(model.named_buffers()) for model in self.models]
        found = {}
        for name, first in everyones[0].items():
            theirs = [one[name] for one in everyones]
            found[name] = _mean(theirs) if first.is_floating_point() else torch.stack(theirs).amax(0)
        return found

    def _parcels(self, number: int, gradients: Gradients, parts: Sequence[float]) -> list[Parcel]:
        layout, parcels = self.layouts[number], []
        for theirs, part in zip(gradients, parts, strict=True):
            found = [theirs[name] for name in layout.names]
            parcels.append(_parcel(layout, [None if one is None else one.to_dense() * part for one in found]))
        return parcels

    def _exchange_gradients(self, number: int, parcels: list[Parcel], is_nonfinite: bool) -> None:
        """is_nonfinite: some worker's numbers are not finite, of this group or of another that keeps a state."""
        layout = self.layouts[number]
        for worker, result in enumerate(self._moved(number, parcels, is_nonfinite)[: len(self.optimizers)]):
            for place, (name, (begin, end)) in enumerate(zip(layout.names, layout.spans, strict=True)):
                parameter = self.named[worker][name]
                mean = _as(parameter, result.values[begin:end].clone())
                mean = torch.full_like(mean, float("nan")) if is_nonfinite else mean
                parameter.grad = mean if any(float(parcel.used[place]) for parcel in parcels) else None

    def _exchange_weights(self, number: int) -> None:
        layout = self.layouts[number]
        parcels = [_parcel(layout, [named[name].detach() for name in layout.names]) for named in self.named]
        for named, result in zip(self.named, self._moved(number, parcels, is_nonfinite=False), strict=True):
            for name, (begin, end) in zip(layout.names, layout.spans, strict=True):
                named[name].copy_(_as(named[name], result.values[begin:end]))

    def _moved(self, number: int, parcels: list[Parcel], is_nonfinite: bool) -> list[Parcel]:
        """The results; states go on, but for what may not: of a step that is not finite, and of what nobody used."""
        layout, before = self.layouts[number], self.states[number]
        results, after = self.answer(self.groups[number].exchange, parcels, before)
        if is_nonfinite:
            return results
        for was, state in zip(before, after, strict=True):
            for place in range(len(layout.names)):
                if not any(float(parcel.used[place]) for parcel in parcels):
                    for entry, value in state.items():
                        begin, end = self.groups[number].exchange.span(entry, layout, place)
                        value[begin:end] = was[entry][begin:end]
        self.states[number] = after
        return results

    def _average_beside(self, gradients: Gradients) -> None:
        """Gradients of groups that carry weights, over all workers or those of a node, in steps in which they are."""
        for group in self.groups:
            due = [one.scope for one in group.exchange.gradients if one.due(self.steps + 1)]
            size = len(self.models) if due[:1] == ["world"] else self.workers_per_node
            for first in range(0, len(self.models), size) if due else ():
                for name in group.parameters:
                    found = [theirs[name] for theirs in gradients[first : first + size]]
                    there = [gradient.to_dense() for gradient in found if gradient is not None]
                    for named in self.named[first : first + size]:
                        named[name].grad = sum(there, torch.zeros_like(named[name])) / size if there else None

    def _average_the_rest(self, gradients: Gradients, parts: Sequence[float]) -> None:
        shared = {name for group in self.groups for name in group.parameters}
        for name in self.named[0].keys() - shared:
            mine = [1.0] * len(parts) if name in self.rows else parts  # where rows are coded, after they were scaled
            found = [(theirs[name], part) for theirs, part in zip(gradients, mine, strict=True)]
            there = [gradient.to_dense() * part for gradient, part in found if gradient is not None]
            for named in self.named:
                named[name].grad = torch.stack(there).sum(0) if there else None


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total, is_one = tensors[0].clone(), torch.ones_like(tensors[0], dtype=torch.bool)
    for tensor in tensors[1:]:
        total += tensor
        is_one &= tensor == tensors[0]
    return torch.where(is_one, tensors[0], total / len(tensors))


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
