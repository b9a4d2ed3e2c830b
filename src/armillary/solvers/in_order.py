"""One unknown after the other (Gauss-Seidel): T calls of the update for one unknown each."""

from torch import Tensor

from armillary.solvers.system import Attempt, System

__all__ = ["finish", "in_order"]


def in_order(system: System, most_sweeps: int) -> Attempt:
    return Attempt(finish(system, system.start, 0), len(system), len(system))


def finish(system: System, states: Tensor, first: int) -> Tensor:
    """All unknowns, where those before `first` are solved already."""
    states = states.clone()
    for t in range(first, len(states)):
        at = slice(t, t + 1)
        states[at] = system.evaluate(states, at)
    return states
