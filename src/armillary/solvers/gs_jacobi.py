"""A window at once; it moves on by what has settled (Gauss-Seidel-Jacobi; Song et al., section 4.3).

Departure from the paper, whose windows have fixed borders: this one slides. Its first unknowns leave it as soon as they
are final for the whole batch, so every pass evaluates a full window.
"""

from armillary.solvers.system import Attempt, System, settled_prefix

__all__ = ["gs_jacobi"]


def gs_jacobi(system: System, most_sweeps: int, window: int) -> Attempt:
    states, unknowns = system.start.clone(), len(system)
    window = min(window, unknowns)
    first, passes, most_passes = 0, 0, most_sweeps * -(-unknowns // window)
    while first < unknowns and passes < most_passes:
        at = slice(first, min(first + window, unknowns))
        new = system.evaluate(states, at)
        settled = settled_prefix(new, states[at], system.tolerance)
        states[first + settled : at.stop] = new[settled:]  # what has settled stays as it was when it was evaluated
        first += min(settled + 1, len(new))  # the first that changed was computed from final ones
        passes += 1
    return Attempt(states, passes, first, "" if first == unknowns else f"no proof within {passes} passes")
