"""All unknowns at once, again and again, until nothing changes (Jacobi; Song et al., section 4).

A triangular system has one fixed point, so "nothing changed" is the proof. After k sweeps the first k unknowns are
final, so T sweeps are enough. One departure: the sweep that changes only the last unknown needs no other to prove it.
"""

from armillary.solvers.system import Attempt, System, is_finite, settled_prefix

__all__ = ["jacobi"]


def jacobi(system: System, most_sweeps: int) -> Attempt:
    states, unknowns = system.start, len(system)
    for sweep in range(1, most_sweeps + 1):
        new = system.evaluate(states, slice(0, unknowns))
        settled = settled_prefix(new, states, system.tolerance)
        if settled == unknowns:
            return Attempt(states, sweep, unknowns)
        # The first that changed was computed from final ones. With a tolerance, only sweeps are counted.
        final = sweep if system.tolerance else settled + 1
        if final >= unknowns:
            return Attempt(new, sweep, unknowns)
        if not is_finite(new):
            return Attempt(new, sweep, final, "not finite")
        states = new
    return Attempt(states, most_sweeps, final, f"no proof within {most_sweeps} sweeps")
