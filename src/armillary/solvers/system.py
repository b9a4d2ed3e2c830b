"""A triangular system of equations: T unknowns, each of which is computed from those before it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Attempt", "Jacobians", "Solved", "Step", "System", "Update", "is_finite", "is_within", "settled_prefix"]

Update = Callable[[Tensor, slice], Tensor]
Step = Callable[[int, Tensor | None], Tensor]
Jacobians = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class System:
    """
    Args of note:
        update: (states, at) -> the unknowns in the slice `at`, each from those before it.
        start: (T, ...) the first guess of all unknowns.
        tolerance: how far a new value may lie from the old one, relative to the larger of 1 and the old one's size.
            0 means equal.
        begin: starts an incremental loop: its step takes t and unknown t-1 (None before the first), gives unknown t.
        jacobians: of a recurrence alone: (states, whether the diagonal is enough) -> new values and derivatives of
            each by the unknown before it, (T, ..., D, D) or (T, ..., D).
    """

    update: Update
    start: Tensor
    tolerance: float = 0.0
    begin: Callable[[], Step] | None = None
    jacobians: Jacobians | None = None

    def __len__(self) -> int:
        return len(self.start)

    def evaluate(self, states: Tensor, at: slice) -> Tensor:
        new, old = self.update(states, at), states[at]
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"solvers: update gives {tuple(new.shape)} of {new.dtype} for {at}, but start has {tuple(old.shape)} "
                f"of {old.dtype} there; give a start of that shape and type"
            )
        return new


@dataclass(frozen=True)
class Attempt:
    """How far a method came: the first `final` unknowns are solved; if not all, `why` says what stopped it."""

    states: Tensor
    passes: int
    final: int
    why: str = ""


@dataclass(frozen=True)
class Solved:
    """A solution and how it was found. `print(solved)` shows `said`.

    Args of note:
        passes: calls of the update, whatever share of the unknowns each evaluated.
        proof: "proven" where a last evaluation changed nothing, "residual <= TOLERANCE", or "" for a loop in order.
        why: what stopped the method, so that the rest was computed in order; else "".
        close_calls: of a sample: draws within 1e-6 of a boundary, which the loop may draw otherwise.
    """

    states: Tensor
    method: str
    passes: int
    proof: str = ""
    why: str = ""
    close_calls: int = 0

    @property
    def said(self) -> str:
        head = f"{self.method}: {self.passes} passes for {len(self.states)} unknowns"
        return ", ".join([head, *filter(None, [f"{self.why}, finished in order" if self.why else self.proof])])

    def __str__(self) -> str:
        return self.said


def is_within(new: Tensor, old: Tensor, tolerance: float) -> Tensor:
    """By element: whether the new value is the old one, up to the tolerance. NaN never is."""
    if tolerance == 0:
        return new == old
    return (new - old).abs() <= tolerance * old.abs().clamp(min=1)


def settled_prefix(new: Tensor, old: Tensor, tolerance: float) -> int:
    """How many unknowns from the first are as they were, over the whole batch."""
    same = is_within(new, old, tolerance).unsqueeze(-1).flatten(1).all(1)
    return int(same.long().cumprod(0).sum())


def is_finite(states: Tensor) -> bool:
    return not states.is_floating_point() or bool(torch.isfinite(states).all())
