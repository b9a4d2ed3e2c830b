"""What the model is while replicas differ: the mean of all ranks' weights, and of what the optimizer keeps for them.

Replicas differ where an exchange carries weights or does not push in every step. Training goes on from each rank's own;
whoever looks from outside (a checkpoint opened elsewhere, an export, an evaluation) sees the mean, summed in the order
of ranks, so that every rank computes the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.collectives import AllGather, Program
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.transport import Transport

__all__ = ["differing", "kept_by_optimizer", "mean_optimizer", "mean_weights", "shown", "take_mean"]

LABEL = "consensus"
BLOCK = 1 << 20  # numbers that are gathered at once


def differing(units: Sequence[Any]) -> dict[str, nn.Parameter]:
    """The parameters whose values differ between ranks, by name."""
    found: dict[str, nn.Parameter] = {}
    for unit in units:
        if isinstance(unit, DenseUnit) and not unit.exchange.keeps_replicas_alike:
            found |= zip(unit.bucket.layout.names, unit.parameters, strict=True)
    return found


def mean_weights(units: Sequence[Any], transport: Transport) -> dict[str, Tensor]:
    """Collective: the mean of every parameter that differs, the same on every rank."""
    return {name: _mean(p.detach(), transport.place.workers, transport) for name, p in differing(units).items()}


@contextmanager
def shown(units: Sequence[Any], transport: Transport) -> Iterator[None]:
    """Collective, between two steps: inside, the model holds the mean; then each rank has its own weights again."""
    own = {parameter: parameter.detach().clone() for parameter in differing(units).values()}
    means = mean_weights(units, transport)
    with torch.no_grad():
        for name, parameter in differing(units).items():
            parameter.copy_(means[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in own.items():
                parameter.copy_(weight)


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
def take_mean(units: Sequence[Any], optimizer: Optimizer, transport: Transport) -> None:
    """Collective: from here on every rank has the mean of the weights, and of what the optimizer keeps for them."""
    kept, parameters = mean_optimizer(units, optimizer, transport), differing(units)
    for name, mean in mean_weights(units, transport).items():
        parameters[name].copy_(mean)
        if name in kept:
            optimizer.state.setdefault(parameters[name], {}).update(kept[name])


def _mean(tensor: Tensor, ranks: int, transport: Transport) -> Tensor:
    """The sum over all ranks, in their order, divided by so many."""
    total: Tensor = transport.complete(_summed_in_order(tensor.detach().reshape(-1)), LABEL)
    mean = total / ranks if total.is_floating_point() or total.is_complex() else total // ranks
    return mean.view(tensor.shape)


def _summed_in_order(flat: Tensor) -> Program[Tensor]:
    pieces = []
    for block in flat.split(BLOCK):
        everyones = yield AllGather(block)
        total = everyones[0].clone()
        for theirs in everyones[1:]:
            total += theirs
        pieces.append(total)
    return torch.cat(pieces) if pieces else flat
