"""Weights that cross the ranks where replicas differ: meetings, and the mean that the model is meanwhile.

Groups meet before the optimizer's step or after it. Nothing else is asked of the ranks then, so an exchange with
neighbours waits for no one else. A rank looks at its own weights before they leave: what is not finite would reach
everybody's.

Training goes on from each rank's own weights. Whoever looks from outside (a checkpoint, an export, an evaluation) sees
the mean, summed in the order of ranks, so that every rank computes the same bits. Where all ranks have one number, that
is the mean, whatever a sum would be rounded to. Buffers that float are averaged too; of whole numbers (batches seen)
the largest is taken.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.codecs.packing import all_finite
from armillary.exchanges.dense import Meeting
from armillary.plans.parcel import Parcel
from armillary.plans.requests import AllGather, Program, summed
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.replica_checks import BufferPlace, differing, differing_buffers, write_buffer
from armillary.transport.in_flight import LaunchQueue, Leaving
from armillary.transport.transport import Transport

__all__ = ["distances", "kept_by_optimizer", "mean_optimizer", "mean_weights", "meet", "shown", "take_mean"]

LABEL = "consensus"
BLOCK = 1 << 20  # numbers that are gathered at once


def mean_weights(units: Sequence[Any], transport: Transport) -> dict[str, Tensor]:
    """Collective: the mean of every parameter that differs, the same on every rank."""
    return {name: _mean(p.detach(), transport.place.workers, transport) for name, p in differing(units).items()}


def distances(units: Sequence[Any], transport: Transport) -> dict[str, float]:
    """Collective: how far each rank's weights of a group that differs are from their mean, over the norm of that; the
    root of the mean square over ranks."""
    found = {}
    for unit in units:
        if isinstance(unit, DenseUnit) and not unit.exchange.keeps_replicas_alike:
            mine = torch.cat([parameter.detach().reshape(-1) for parameter in unit.parameters])
            mean = transport.complete(summed(mine.clone()), LABEL) / transport.place.workers
            squares = transport.share(float((mine - mean).double().norm()) ** 2)
            found[unit.name] = math.sqrt(sum(squares) / len(squares)) / (float(mean.double().norm()) or 1.0)
    return found


def _mean_buffers(places: Sequence[BufferPlace], transport: Transport) -> list[Tensor]:
    """Collective.

    Raises:
        RuntimeError: a buffer is not of one shape on all ranks.
    """
    everyones = transport.share([(tuple(one.there.shape), str(one.there.dtype)) for one in places]) if places else []
    for place, *theirs in zip(places, *everyones, strict=True):
        if len(set(theirs)) > 1:
            told = ", ".join(f"rank {rank}: {shape}" for rank, (shape, _) in enumerate(theirs))
            raise RuntimeError(
                f"buffer {place.name!r} has not one shape on all ranks ({told}), so replicas have no mean of it; keep "
                "it as a plain attribute of its module"
            )
    workers = transport.place.workers
    return [
        _mean(one.there, workers, transport)
        if one.there.is_floating_point() or one.there.is_complex()
        else _largest(one.there, transport)
        for one in places
    ]


@contextmanager
def shown(units: Sequence[Any], model: nn.Module, transport: Transport) -> Iterator[None]:
    """Collective, between two steps: inside, the model holds the mean; then each rank has its own weights again."""
    places = differing_buffers(units, model)
    own = {parameter: parameter.detach().clone() for parameter in differing(units).values()}
    own_buffers = [one.there.clone() for one in places]
    means, buffers = mean_weights(units, transport), _mean_buffers(places, transport)
    _write(differing(units), means)
    _write_buffers(places, buffers)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in own.items():
                parameter.copy_(weight)
        _write_buffers(places, own_buffers)


@torch.no_grad()
def _write(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


@torch.no_grad()
def _write_buffers(places: Sequence[BufferPlace], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        write_buffer(place, value)


def kept_by_optimizer(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The tensors among what it keeps for a parameter, by entry."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {entry: value for entry, value in state.items() if isinstance(value, Tensor)}


def mean_optimizer(units: Sequence[Any], optimizer: Optimizer, transport: Transport) -> dict[str, dict[str, Tensor]]:
    """Collective: the same of the tensors that the optimizer keeps for these parameters, by parameter and entry. A rank
    on which a parameter was never stepped has none, and does not count in its mean."""
    parameters = differing(units)
    mine = {
        name: {entry: (tuple(value.shape), value.dtype) for entry, value in kept_by_optimizer(optimizer, p).items()}
        for name, p in parameters.items()
    }
    everyones = transport.share(mine) if parameters else []
    means: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        kept = kept_by_optimizer(optimizer, parameter)
        known = {entry: like for theirs in everyones for entry, like in theirs[name].items()}
        for entry, (shape, dtype) in sorted(known.items()):
            there = sum(entry in theirs[name] for theirs in everyones)
            value = kept.get(entry, torch.zeros(shape, dtype=dtype, device=parameter.device))
            means.setdefault(name, {})[entry] = _mean(value, there, transport)
    return means


@torch.no_grad()
def take_mean(units: Sequence[Any], model: nn.Module, optimizer: Optimizer, transport: Transport) -> None:
    """Collective: from here on every rank has the mean of the weights, of what the optimizer keeps for them, and of
    buffers."""
    kept, parameters = mean_optimizer(units, optimizer, transport), differing(units)
    _write(parameters, mean_weights(units, transport))
    for name, entries in kept.items():
        optimizer.state.setdefault(parameters[name], {}).update(entries)
    places = differing_buffers(units, model)
    _write_buffers(places, _mean_buffers(places, transport))


def _mean(tensor: Tensor, ranks: int, transport: Transport) -> Tensor:
    """The sum over all ranks, in their order, divided by so many."""

    def mean_of(everyones: Tensor) -> Tensor:
        total = everyones[0].clone()
        for theirs in everyones[1:]:
            total += theirs
        mean = total / ranks if total.is_floating_point() or total.is_complex() else total // ranks
        return torch.where((everyones == everyones[0]).all(0), everyones[0], mean)

    return _over_ranks(tensor, mean_of, transport)


def _largest(tensor: Tensor, transport: Transport) -> Tensor:
    whole = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return _over_ranks(whole, lambda everyones: everyones.amax(0), transport).view(tensor.dtype)


def _over_ranks(tensor: Tensor, join: Callable[[Tensor], Tensor], transport: Transport) -> Tensor:
    """join: of all ranks' numbers, (ranks, n), what every rank takes, (n,)."""
    joined: Tensor = transport.complete(_joined(tensor.detach().reshape(-1), join), LABEL)
    return joined.view(tensor.shape)


def _joined(flat: Tensor, join: Callable[[Tensor], Tensor]) -> Program[Tensor]:
    pieces = []
    for block in flat.split(BLOCK):
        everyones = yield AllGather(block)
        pieces.append(join(everyones))
    return torch.cat(pieces) if pieces else flat


@torch.no_grad()
def meet(units: Sequence[object], steps: int, when: Meeting, transport: Transport) -> None:
    """Groups that are due before or after that step, from first to last request of all of them.

    Args:
        steps: how many are complete after it.

    Raises:
        FloatingPointError: this rank's weights are not finite. Nothing was sent.
    """
    meeting = [unit for unit in units if isinstance(unit, DenseUnit) and unit.meets(steps, when)]
    parcels = {unit.name: unit.weigh_in() for unit in meeting}
    _refuse_nonfinite([*parcels.values()], steps, transport.place.rank)
    queue = LaunchQueue(transport, meeting)
    queue.launch(lambda unit: Leaving(unit.push(parcels[unit.name], transport.place), unit.exchange.requests))
    for unit, moved in zip(meeting, queue.land(), strict=True):
        unit.take_weights(moved)


def _refuse_nonfinite(parcels: Sequence[Parcel], steps: int, rank: int) -> None:
    found = [one for one in parcels if not bool(all_finite(one.values))]
    nonfinite = [
        name
        for one in found
        for name, (begin, end) in zip(one.layout.names, one.layout.spans, strict=True)
        if not bool(all_finite(one.values[begin:end]))
    ]
    if nonfinite:
        more = f" and {len(nonfinite) - 1} more" if len(nonfinite) > 1 else ""
        raise FloatingPointError(
            f"rank {rank}: in step {steps} its weights are not finite ({nonfinite[0]}{more}), and none were sent to "
            "the other ranks; look at this rank's batches and learning rate, and begin again from a checkpoint"
        )
