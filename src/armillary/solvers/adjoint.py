"""Gradients of solved states: the adjoint l_t = J_(t+1)^T l_(t+1) + g_t, where g_t is the gradient of state t alone.

It is linear, so with whole Jacobians one reverse scan solves it. With their diagonal it is iterated as the states were,
until nothing moves, else taken in order: a diagonal alone would give wrong gradients. One call of the cell then turns
the l_t into gradients of parameters, inputs and start.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from armillary.solvers.recurrence import Recurrence
from armillary.solvers.scan import scan
from armillary.solvers.system import is_finite, is_within

__all__ = ["with_gradients"]


def with_gradients(recurrence: Recurrence, states: Tensor, is_whole: bool, most_sweeps: int) -> Tensor:
    """The states, with a graph behind them where anything wants a gradient.

    Args:
        is_whole: whether the backward may hold whole Jacobians, (T, ..., D, D).
        most_sweeps: of an adjoint that is iterated.
    """
    if not torch.is_grad_enabled():
        return states
    new = recurrence.update(states, slice(0, len(states)))
    if not new.requires_grad:
        return states
    found: Tensor = _Adjoint.apply(new, states, recurrence, is_whole, most_sweeps)  # type: ignore[no-untyped-call]
    return found


class _Adjoint(torch.autograd.Function):
    """Gives the solved states forward. Backward, the cell's one call gets l in place of g."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, states: Tensor, recurrence: Recurrence, is_whole: bool, most_sweeps: int) -> Any:
        ctx.recurrence, ctx.states, ctx.is_whole, ctx.most_sweeps = recurrence, states, is_whole, most_sweeps
        return states.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        size = gradient.abs().max()
        if size == 0 or not torch.isfinite(size):
            return gradient, None, None, None, None
        unit = gradient / size  # so that a tolerance means the same for small gradients
        found = _scanned(ctx.recurrence, ctx.states, unit) if ctx.is_whole else None
        if found is None or not is_finite(found):
            found = _iterated(ctx.recurrence, ctx.states, unit, 1 if ctx.is_whole else ctx.most_sweeps)
        return size * (_in_order(ctx.recurrence, ctx.states, unit) if found is None else found), None, None, None, None


def _scanned(recurrence: Recurrence, states: Tensor, gradient: Tensor) -> Tensor:
    _, jacobians = recurrence.jacobians(states, False)
    return _reverse_scan(jacobians.transpose(-1, -2), gradient)


def _reverse_scan(jacobians: Tensor, added: Tensor) -> Tensor:
    """l_t = J_(t+1) l_(t+1) + a_t from the end."""
    return scan(jacobians.flip(0).roll(1, 0), added.flip(0)).flip(0)


def _iterated(recurrence: Recurrence, states: Tensor, gradient: Tensor, most_sweeps: int) -> Tensor | None:
    """By the diagonal of J, until no l moves; None where that does not end."""
    tolerance = torch.finfo(states.dtype).eps ** 0.8
    _, diagonal = recurrence.jacobians(states, True)
    new, before = recurrence.watched(states)
    adjoint = gradient
    for _ in range(most_sweeps):
        (pulled,) = torch.autograd.grad(new, before, adjoint, retain_graph=True)
        residual = torch.cat([pulled[1:], torch.zeros_like(pulled[:1])]) + gradient - adjoint
        change = _reverse_scan(diagonal, residual)
        moved = adjoint + change
        if is_within(adjoint + residual, adjoint, tolerance).all() and is_within(moved, adjoint, tolerance).all():
            return moved
        adjoint = moved
    return None


def _in_order(recurrence: Recurrence, states: Tensor, gradient: Tensor) -> Tensor:
    adjoint = gradient.clone()
    for t in range(len(states) - 2, -1, -1):
        with torch.enable_grad():
            state = states[t].detach().requires_grad_()
            new = recurrence.cell(recurrence.xs[t + 1].detach(), state)
            (pulled,) = torch.autograd.grad(new, state, adjoint[t + 1].clone(), materialize_grads=True)
        adjoint[t] += pulled
    return adjoint
