"""Blocks at once, in order inside each (Jacobi-Gauss-Seidel; Song et al., section 4.3).

One call evaluates the k-th unknown of every block. T / block sweeps of `block` calls are enough. It pays where blocks
run on processors that would be idle.
"""

import torch

from armillary.solvers.system import Attempt, System, is_within, settled_prefix

__all__ = ["jacobi_gs"]


def jacobi_gs(system: System, most_sweeps: int, block: int) -> Attempt:
    states, unknowns = system.start.clone(), len(system)
    calls, passes = min(block, unknowns), 0
    for _ in range(most_sweeps):
        old = states.clone()
        for offset in range(calls):
            at = slice(offset, unknowns, block)
            new = system.evaluate(states, at)
            # What moves by no more than the tolerance stays, so a sweep that moves nothing measured all residuals.
            states[at] = torch.where(is_within(new, states[at], system.tolerance), states[at], new)
        passes += calls
        settled = settled_prefix(states, old, 0.0)
        final = settled if system.tolerance else (settled // block + 1) * block
        if final >= unknowns:
            return Attempt(states, passes, unknowns)
    final = 0 if system.tolerance else final
    return Attempt(states, passes, final, f"no proof within {most_sweeps} sweeps")
