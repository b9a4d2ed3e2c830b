"""All steps of a recurrence at once by Newton's method (DEER; Lim et al., ICLR 2024).

A sweep evaluates the cell and its Jacobians J_t at all states, and solves the system that is linear in the change:
d_t = J_t d_(t-1) + r_t, where r_t is the cell's value less the state. The paper solves for the states themselves. The
result is the same, but here rounding shrinks with the residual. With the diagonal of J alone the sweeps are cheaper and
there are more of them; the solution is the same, since a residual ends them.
"""

from armillary.solvers.scan import scan
from armillary.solvers.system import Attempt, System, is_finite, is_within

__all__ = ["newton"]

GROWN = 1e6  # a change by so many times the cell's values will not come back


def newton(system: System, most_sweeps: int, diagonal: bool = False, memory_bytes: int = 1 << 30) -> Attempt:
    states, tolerance = system.start, system.tolerance
    if system.jacobians is None:
        raise ValueError("newton: solves recurrences only; call solvers.recur, or take jacobi for other systems")
    jacobian_bytes = states.numel() * states.element_size() * (1 if diagonal else states.shape[-1])
    if jacobian_bytes > memory_bytes:
        raise ValueError(
            f"newton: the Jacobians of {tuple(states.shape)} states take {jacobian_bytes:,} bytes, more than "
            f"memory_bytes={memory_bytes:,}; take diagonal=True, or a larger memory_bytes"
        )
    for sweep in range(1, most_sweeps + 1):
        new, jacobians = system.jacobians(states, diagonal)
        change = scan(jacobians, new - states)
        # Both at the same states, which are returned as they were when their residual was measured.
        if is_within(new, states, tolerance).all() and is_within(states + change, states, tolerance).all():
            return Attempt(states, sweep, len(states))
        if not is_finite(change) or change.abs().max() > GROWN * new.abs().max().clamp(min=1):
            return Attempt(states, sweep, 0, f"grew in sweep {sweep}")
        states = states + change
    return Attempt(states, most_sweeps, 0, f"no proof within {most_sweeps} sweeps")
