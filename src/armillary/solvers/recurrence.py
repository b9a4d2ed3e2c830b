"""A recurrence h_t = cell(x_t, h_(t-1)) as a system of equations: the cell at many steps at once, and its Jacobians."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.solvers.checks import is_close

__all__ = ["Cell", "Recurrence", "looped", "probed"]

Cell = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recurrence:
    """
    Args of note:
        xs: (T, ..., I)
        start: (..., D)
        is_folded: whether steps join the first dimension of the batch, for cells that take no other shape.
    """

    cell: Cell
    xs: Tensor
    start: Tensor
    is_folded: bool = False

    def called(self, xs: Tensor, before: Tensor) -> Tensor:
        """The cell at some steps at once: (K, ..., I) and (K, ..., D) give (K, ..., D)."""
        if not self.is_folded:
            return self.cell(xs, before)
        folded = self.cell(xs.flatten(0, 1), before.flatten(0, 1))
        return folded.view(*before.shape[:2], *folded.shape[1:])

    def update(self, states: Tensor, at: slice) -> Tensor:
        return self.called(self.xs[at], self.before(states, at))

    def before(self, states: Tensor, at: slice) -> Tensor:
        """The states that the steps in the slice begin from."""
        if at.start:
            return states[at.start - 1 : at.stop - 1 : at.step]
        return torch.cat([self.start[None], states[(at.step or 1) - 1 : at.stop - 1 : at.step]])

    def jacobians(self, states: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
        """New values (T, ..., D), and their derivatives by the states before: (T, ..., D, D), or the diagonal."""
        new, before = self.watched(states)
        return new.detach(), _derivatives(new, before, diagonal)

    def watched(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """All steps with a graph from the states they begin from, which is the second of the two."""
        with torch.enable_grad():
            before = self.before(states, slice(0, len(states))).detach().requires_grad_()
            new = self.called(self.xs.detach(), before)
            return new if new.requires_grad else new + 0 * before, before


def _derivatives(new: Tensor, before: Tensor, diagonal: bool) -> Tensor:
    """Row by row of J: no row of a batch hears another, so one product serves all steps and the whole batch."""
    rows = []
    for place, unit in enumerate(torch.eye(new.shape[-1], dtype=new.dtype, device=new.device)):
        (row,) = torch.autograd.grad(new, before, unit.expand_as(new), retain_graph=True, materialize_grads=True)
        rows.append(row[..., place] if diagonal else row)
    return torch.stack(rows, -1 if diagonal else -2)


def looped(cell: Cell, xs: Tensor, start: Tensor) -> Tensor:
    """Step by step, as the caller would write it."""
    state, states = start, []
    for x in xs:
        state = _stepped(cell, x, state)
        states.append(state)
    return torch.stack(states)


def _stepped(cell: Cell, x: Tensor, state: Tensor) -> Tensor:
    version = state._version
    new = cell(x, state)
    if state._version != version:
        raise ValueError("recur: the cell writes its state in place; let it return a new tensor")
    if new.shape != state.shape or new.dtype != state.dtype:
        raise ValueError(
            f"recur: start has shape {tuple(state.shape)} of {state.dtype}, but the cell makes {tuple(new.shape)} of "
            f"{new.dtype} of it; give a start of that shape and type"
        )
    return new


@torch.no_grad()
def probed(recurrence: Recurrence) -> Recurrence:
    """Its cell tried on two steps: alone and together, twice, and with one row changed."""
    cell, xs, start = recurrence.cell, recurrence.xs, recurrence.start
    draw = torch.Generator().manual_seed(0)
    some = start + torch.rand(len(xs[:2]), *start.shape, generator=draw).to(start) - 0.5
    alone, again = (torch.stack([_stepped(cell, *both) for both in zip(xs[:2], some, strict=True)]) for _ in range(2))
    if not torch.equal(alone, again):
        raise ValueError("recur: two calls of the cell with equal inputs differ; take what it draws or keeps out of it")
    why = "it gives other values for two steps at once than for each alone"
    for is_folded in (False, True)[: start.ndim]:
        found = replace(recurrence, is_folded=is_folded)
        try:
            both = found.called(xs[:2], some)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            why = f"two steps at once end in: {error}"
            continue
        if both.shape == alone.shape and is_close(both, alone):
            changed = some.clone()
            changed.view(-1, some.shape[-1])[0] += 0.5
            if not is_close(found.called(xs[:2], changed).flatten(0, -2)[1:], both.flatten(0, -2)[1:]):
                why = "rows of its batch hear each other"
                continue
            return found
    raise ValueError(f"recur: the cell cannot be solved in parallel: {why}; take method='in_order'")
