"""The truth of the tests of outcomes: one process, one plain loop over everyone's batches, slow and obvious."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    steps: Sequence[Sequence[Any]],
    *,
    weights: Callable[[Any], float] = lambda batch: 1.0,
    clip: Callable[[nn.Module], Any] = lambda model: None,
    divisor: float = 0.0,
    is_late: bool = False,
) -> list[list[float]]:
    """Trains on `steps`, the batches of each step taken one after the other; the losses of each.

    Args:
        weights: how much a batch counts. divisor: of the weighted sum of gradients; 0 for the sum of weights.
        clip: changes gradients before the optimizer's step.
        is_late: gradients are taken at the weights of the step before (of the first step: at the first weights).
    """
    told, older = [], copy.deepcopy(model)
    for batches in steps:
        read = older if is_late else model
        newest = copy.deepcopy(model)
        seen = [(weights(batch), *gradients_of(read, loss, batch)) for batch in batches]
        told.append([value for _, value, _ in seen])
        whole = divisor or sum(weight for weight, _, _ in seen)
        for name, parameter in model.named_parameters():
            mine = [weight * found[name] for weight, _, found in seen if name in found]
            total = mine[0] if mine else None
            for one in mine[1:]:
                total = total + one
            parameter.grad = None if total is None else total / whole
        clip(model)
        optimizer.step()
        older = newest
    return told


def gradients_of(model: nn.Module, loss: Loss, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(value.detach()), found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def apart(these: dict[str, Tensor], those: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference of every tensor, relative to its norm; of those that differ at all."""
    assert these.keys() == those.keys(), these.keys() ^ those.keys()
    far = {name: float((these[name] - those[name]).norm() / (1e-30 + those[name].norm())) for name in those}
    return {name: value for name, value in far.items() if value != 0}


def differ(these: dict[str, Tensor], those: dict[str, Tensor], tolerance: float = 1e-10) -> dict[str, float]:
    """Those that are further apart than rounding."""
    return {name: value for name, value in apart(these, those).items() if not value <= tolerance}


def same(these: Any, those: Any) -> bool:
    """Bit for bit, whatever nests the tensors."""
    if isinstance(these, Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(same(these[key], those[key]) for key in these)
    if isinstance(these, list | tuple):
        return len(these) == len(those) and all(map(same, these, those))
    return bool(these == those)
