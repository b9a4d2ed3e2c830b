"""Whether a batch may be cut into micro-batches: tried on a float64 copy of the model, not assumed.

Schedules that cut a batch are exact only if its loss and gradients are the means over its parts. A sum over tokens,
batch statistics or a term that compares samples break that, and no reading of the code would show it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["EXACT_SPLIT", "UNTRIED", "split_trial"]

UNTRIED = "untried"
EXACT_SPLIT = "exact"
PARTS = 2
TOLERANCE = 1e-10  # of the norm, in float64
MOST_BYTES = 256 << 20  # of a model that is copied for the trial

Loss = Callable[[nn.Module, Any], Tensor]


def split_trial(model: nn.Module, batch: Any, loss: Loss) -> str:
    """`EXACT_SPLIT` if loss and gradients of the batch are the means over its halves, `UNTRIED` if the model is too
    large to be copied, else why not. Random layers are off in the trial, and whatever stops it is told, not raised."""
    if names := [path for path, module in model.named_modules() if getattr(module, "track_running_stats", False)]:
        return f"{names[0]} keeps statistics of its batches"
    if sum(parameter.nbytes for parameter in model.parameters()) > MOST_BYTES:
        return UNTRIED
    halves = _halves(batch)
    if halves is None:
        return "the tensors of a batch have no first dimension in common that can be halved"
    try:
        twin = copy.deepcopy(model).double().eval()
        whole = _loss_and_gradients(twin, _double(batch), loss)
        parts = [_loss_and_gradients(twin, _double(half), loss) for half in halves]
    except Exception as error:  # whatever stops the trial, in whatever form, is the answer here
        said = next(iter(str(error).splitlines()), type(error).__name__)
        return f"a float64 copy of the model cannot be run on half a batch: {said}"
    for name, value in whole.items():
        mean = sum(part[name] for part in parts) / PARTS
        if float((value - mean).norm()) > TOLERANCE * max(float(value.norm()), float(whole[""].norm())):
            return f"the {f'gradient of {name}' if name else 'loss'} is no mean over the parts of a batch"
    return EXACT_SPLIT


def _halves(batch: Any) -> list[Any] | None:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or (size := sizes.pop()) < PARTS or size % PARTS:
        return None
    half = size // PARTS
    return [
        tree_map(lambda leaf, at=first: leaf[at : at + half] if isinstance(leaf, Tensor) else leaf, batch)
        for first in range(0, size, half)
    ]


def _double(batch: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _loss_and_gradients(model: nn.Module, batch: Any, loss: Loss) -> dict[str, Tensor]:
    """By parameter name; the loss under the empty name. A parameter without gradient counts as zero."""
    model.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    found = {"": value.detach().double()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found
