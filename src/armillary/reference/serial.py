"""The truth of an N-worker plan: plain PyTorch in one process, looping over the same N per-worker batches.

Each worker's batch runs with that worker's random stream; gradients are summed in worker order and scaled as declared;
then one step of the user's optimizer. Imports no exchange and no runtime code, so it cannot share their faults.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["keep_untouched_rows", "train_step"]

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    loss: Loss,
    weights: Sequence[float] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """One training step over `batches`, one per worker; returns each worker's loss.

    The gradient is sum_w weight_w g_w / sum_w weight_w; without weights, the mean over workers. A parameter that no
    worker used keeps grad None; one that some used counts as zero for the others. `before_step` is where a user
    clips.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shares = list(weights) if weights is not None else [1.0] * len(batches)
    total: list[Tensor | None] = [None] * len(parameters)
    losses = []
    for batch, share in zip(batches, shares, strict=True):
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, batch)
        value.backward()
        losses.append(float(value.detach()))
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            mine = gradient * share
            before = total[index]
            total[index] = mine if before is None else before + mine
    divisor = sum(shares) or 1.0
    for parameter, summed in zip(parameters, total, strict=True):
        parameter.grad = None if summed is None else summed / divisor
    if before_step is not None:
        before_step(model)
    optimizer.step()
    return losses


def keep_untouched_rows(model: nn.Module, optimizer: Optimizer, names: Sequence[str], step: Callable[[], None]) -> None:
    """The meaning of lazy rows: after `step`, rows of the named tables whose gradient is zero are put back where they
    were.

    Weight and row-shaped optimizer state alike. A row whose gradient happens to cancel to exactly zero counts as
    untouched here and as touched in the runtime; tests avoid that.
    """
    tables: Mapping[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if name in names}
    before = {name: (p.detach().clone(), _row_state(optimizer, p)) for name, p in tables.items()}
    step()
    for name, parameter in tables.items():
        weight, state = before[name]
        assert parameter.grad is not None
        still = parameter.grad.flatten(1).abs().sum(1) == 0 if parameter.dim() > 1 else parameter.grad == 0
        with torch.no_grad():
            parameter[still] = weight[still]
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value[still] = state[key][still] if key in state else 0.0


def _row_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
