"""The layers of a network as unknowns: how many Jacobi sweeps agree with the pass through them (Song et al., 5.2).

What a sweep would save is an estimate, as it is in the paper: it supposes an idle processor for every layer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.solvers.checks import refuse_train_mode

__all__ = ["LayerSweeps", "layers"]


@dataclass(frozen=True)
class LayerSweeps:
    """
    Args of note:
        errors: after each sweep, how far the last layer's output is from the true one, relative to its size.
        layer_seconds: of each layer in the pass in order.
    """

    sweeps: int
    errors: tuple[float, ...]
    layer_seconds: tuple[float, ...]

    @property
    def estimated_seconds(self) -> float:
        """The paper's estimate: sweeps times the slowest layer. Not a measured time."""
        return self.sweeps * max(self.layer_seconds, default=0.0)

    @property
    def said(self) -> str:
        return (
            f"{self.sweeps} sweeps for {len(self.layer_seconds)} layers, {sum(self.layer_seconds):.3g} s in order; "
            f"estimated with a processor for every layer: {self.estimated_seconds:.3g} s"
        )

    def __str__(self) -> str:
        return self.said


@torch.no_grad()
def layers(
    modules: Sequence[Callable[[Any], Tensor]], x: Tensor, tolerance: float = 1e-3, dense: bool = False
) -> LayerSweeps:
    """Jacobi sweeps over all layers at once, from outputs of zero, until no output moves by more than the tolerance.

    Args:
        modules: layers in order. Each takes the output of the one before it.
        x: what the first one takes.
        tolerance: of a layer's output, relative to its size; a residual.
        dense: each layer takes a list of x and all outputs before it, as the dense layers of torchvision do.
    """
    for number, module in enumerate(modules):
        refuse_train_mode(module, f"layers: layer {number}")
    truth, seconds = [x], []
    for module in modules:
        began = time.perf_counter()
        truth.append(module(truth[:] if dense else truth[-1]))
        seconds.append(time.perf_counter() - began)
    states, moved = [x, *map(torch.zeros_like, truth[1:])], float("inf")
    errors: list[float] = []
    while moved > tolerance and len(errors) < len(modules):
        new = [module(states[:t] if dense else states[t - 1]) for t, module in enumerate(modules, start=1)]
        moved = max(_distance(one, old) for one, old in zip(new, states[1:], strict=True))
        states = [x, *new]
        errors.append(_distance(states[-1], truth[-1]))
    return LayerSweeps(len(errors), tuple(errors), tuple(seconds))


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-30)) if one.numel() else 0.0
