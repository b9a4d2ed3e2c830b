"""The table of methods, and a system solved by one of them: in order from where it does not settle."""

import inspect
from collections.abc import Callable
from typing import Any

from armillary.plans.registry import Choice
from armillary.solvers.gs_jacobi import gs_jacobi
from armillary.solvers.in_order import finish, in_order
from armillary.solvers.incremental import incremental
from armillary.solvers.jacobi import jacobi
from armillary.solvers.jacobi_gs import jacobi_gs
from armillary.solvers.newton import newton
from armillary.solvers.system import Attempt, Solved, System

__all__ = ["IN_ORDER", "METHODS", "chosen", "completed"]

METHODS: dict[str, Callable[..., Attempt]] = {
    one.__name__: one for one in (in_order, incremental, jacobi, gs_jacobi, jacobi_gs, newton)
}
LOOPS = ("in_order", "incremental")  # which prove nothing: they are the definition
IN_ORDER = Choice("in_order")


def chosen(method: str, options: dict[str, Any], most_sweeps: int) -> Choice:
    """A method with its options, or an error that says which there are."""
    if method not in METHODS and method != "auto":
        raise ValueError(f"solvers: no method {method!r}; there are auto, {', '.join(METHODS)}")
    known = list(inspect.signature(METHODS[method]).parameters.values())[2:] if method in METHODS else []
    names = [one.name for one in known]
    if strange := options.keys() - set(names):
        raise ValueError(f"solvers: {method} has no option {min(strange)!r}; it has {', '.join(names) or 'none'}")
    if missing := [one.name for one in known if one.default is one.empty and one.name not in options]:
        raise ValueError(f"solvers: {method} wants {missing[0]}=NUMBER of unknowns, as in {missing[0]}=64")
    for name, value in {**options, "most_sweeps": most_sweeps}.items():
        if value < 1 and name != "diagonal":
            raise ValueError(f"solvers: want {name} of 1 or more, got {value}")
    return Choice(method, options)


def completed(system: System, method: Choice, most_sweeps: int) -> Solved:
    """By the method, and in order from where it stopped."""
    found = METHODS[method.name](system, most_sweeps, **method.options) if len(system) else Attempt(system.start, 0, 0)
    rest = len(system) - found.final
    proof = f"residual <= {system.tolerance:g}" if system.tolerance else "proven"
    return Solved(
        finish(system, found.states, found.final) if rest else found.states,
        str(method),
        found.passes + rest,
        "" if method.name in LOOPS else proof,
        found.why,
    )
