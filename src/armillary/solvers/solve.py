"""Any triangular system solved by the method that the caller names, or by the fastest of a trial."""

import torch
from torch import Tensor

from armillary.solvers.auto import solved_by_trial
from armillary.solvers.methods import chosen, completed
from armillary.solvers.system import Solved, System, Update

__all__ = ["solve"]


@torch.no_grad()
def solve(
    update: Update, start: Tensor, method: str = "auto", tolerance: float = 0.0, most_sweeps: int = 50, **options: int
) -> Solved:
    """Solves s_t = f_t(s_0 .. s_(t-1)) for all t.

    Args:
        update: (states, at) -> the unknowns in the slice `at`, each from those before it. states is (T, ...), the
            result is like states[at]. Slices have a step under jacobi_gs. No gradient is kept.
        start: (T, ...) a first guess. Its shape and type are those of the solution.
        method: in_order, jacobi, gs_jacobi (window=), jacobi_gs (block=), or "auto": the fastest of a trial, kept for
            this update, shape and device.
        tolerance: 0 goes on until no bit changes. Above 0: an unknown has settled if its equation holds up to this,
            relative to the larger of 1 and its size.
        most_sweeps: so many evaluations of all unknowns without a proof, and the rest is computed in order.
        options: of the method.

    Raises:
        ValueError: no such method or option, or an update of another shape or type than the start.
    """
    wanted = chosen(method, options, most_sweeps)
    if not isinstance(start, Tensor) or start.ndim == 0:
        raise ValueError("solve: start has no dimension of unknowns; give a tensor (T, ...)")
    if tolerance < 0 or (tolerance and not start.is_floating_point()):
        raise ValueError(f"solve: want a tolerance of 0, or more for real numbers, got {tolerance} for {start.dtype}")
    system = System(update, start, tolerance)
    if wanted.name == "auto":
        return solved_by_trial(system, update, most_sweeps)
    return completed(system, wanted, most_sweeps)
