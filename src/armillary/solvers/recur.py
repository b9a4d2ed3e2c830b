"""All states of a recurrence at once, with gradients: `for x in xs: h = cell(x, h)` without the loop."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from armillary.plans.registry import Choice
from armillary.solvers.adjoint import with_gradients
from armillary.solvers.auto import Way, keep, picked, seconds_of
from armillary.solvers.checks import refuse_train_mode
from armillary.solvers.methods import IN_ORDER, METHODS, chosen
from armillary.solvers.recurrence import Cell, Recurrence, looped, probed
from armillary.solvers.system import Attempt, Solved, System

__all__ = ["recur"]

STRETCH = 32  # steps of a loop that are timed
PARALLEL = (Choice("newton"), Choice("newton", {"diagonal": True}), Choice("jacobi"))  # what "auto" tries


def recur(
    cell: Cell,
    xs: Tensor,
    start: Tensor,
    method: str = "auto",
    tolerance: float | None = None,
    most_sweeps: int = 50,
    report: Callable[[Solved], object] | None = None,
    **options: int,
) -> Tensor:
    """The states h_t = cell(x_t, h_(t-1)) of all t, with their gradients (once; not gradients of gradients).

    Args:
        cell: (x, h) -> the next h. A function of the two and of parameters: it keeps nothing and draws nothing.
        xs: (T, ..., I) inputs. What lies between T and I is a batch whose rows do not hear each other.
        start: (..., D) the state before the first input.
        method: newton, jacobi, gs_jacobi (window=), jacobi_gs (block=), in_order, or "auto": the fastest of a trial.
            newton takes diagonal=True, which holds T x D numbers in place of T x D x D, and memory_bytes=, the most
            that these may take (1 GiB).
        tolerance: up to which every equation holds, relative to the larger of 1 and the state's size. None: the
            precision of the state's type to the power 0.8, which is 3e-13 in float64 and 3e-6 in float32.
        most_sweeps: so many evaluations of all steps without a proof, and the loop is run.
        report: is given a `Solved`, as `print` or the `append` of a list take it. Without it a fallback is a warning.
        options: of the method.

    Returns:
        (T, ..., D)

    Raises:
        ValueError: a cell that is no such function, a start of another shape, or no such method or option.
    """
    wanted = chosen(method, options, most_sweeps)
    if xs.ndim < 1 or start.ndim < 1 or not start.is_floating_point():
        raise ValueError(
            f"recur: want xs (T, ..., I) and a start (..., D) of real numbers, got {tuple(xs.shape)} and "
            f"{tuple(start.shape)} of {start.dtype}"
        )
    if tolerance is not None and tolerance < 0:
        raise ValueError(f"recur: want a tolerance of 0 or more, got {tolerance}")
    refuse_train_mode(cell, "recur")
    tolerance = torch.finfo(start.dtype).eps ** 0.8 if tolerance is None else tolerance
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):  # J is taken under inference mode, too
        xs, start = (one.clone() if one.is_inference() else one for one in (xs, start))
        solved = _solved(_Job(Recurrence(cell, xs, start), tolerance, most_sweeps), wanted)
    if report is not None:
        report(replace(solved, states=solved.states.detach()))
    elif solved.why:
        warnings.warn(f"recur: {solved.said}", stacklevel=2)
    return solved.states


@dataclass(frozen=True)
class _Job:
    recurrence: Recurrence
    tolerance: float
    most_sweeps: int


def _solved(job: _Job, wanted: Choice) -> Solved:
    recurrence = job.recurrence
    cell, xs, start = recurrence.cell, recurrence.xs, recurrence.start
    if len(xs) == 0:
        return Solved(start.new_zeros(0, *start.shape), str(wanted), 0)
    key = (tuple(xs.shape), tuple(start.shape), start.dtype, start.device, job.tolerance, torch.is_grad_enabled())
    is_auto = wanted.name == "auto"
    if is_auto:
        loop_seconds = partial(_loop_seconds, recurrence)
        wanted = picked(cell, key, loop_seconds, _ways(job), job.most_sweeps) if len(xs) > 1 else IN_ORDER
    if wanted == IN_ORDER:
        return Solved(looped(cell, xs, start), str(wanted), len(xs))
    job = replace(job, recurrence=probed(recurrence))
    found = _attempt(job, wanted, job.most_sweeps)
    if found.final < len(xs):
        if is_auto:
            keep(cell, key, IN_ORDER)  # it settled in the trial and does not now
        return Solved(looped(cell, xs, start), str(wanted), found.passes + len(xs), why=found.why)
    states = _with_gradients(job, found.states, wanted)
    return Solved(states, str(wanted), found.passes, f"residual <= {job.tolerance:.1g}" if job.tolerance else "proven")


@torch.no_grad()
def _attempt(job: _Job, method: Choice, most_sweeps: int) -> Attempt:
    recurrence = job.recurrence
    guess = recurrence.start.detach().expand(len(recurrence.xs), *recurrence.start.shape)
    system = System(recurrence.update, guess, job.tolerance, jacobians=recurrence.jacobians)
    return METHODS[method.name](system, most_sweeps, **method.options)


def _with_gradients(job: _Job, states: Tensor, method: Choice) -> Tensor:
    is_whole = method.name == "newton" and not method.options.get("diagonal")
    return with_gradients(job.recurrence, states, is_whole, job.most_sweeps)


def _loop_seconds(recurrence: Recurrence) -> float:
    """Of the loop over all steps and its backward, from a stretch of it."""
    stretch = min(len(recurrence.xs), STRETCH)

    def run() -> Tensor:
        return _differentiated(looped(recurrence.cell, recurrence.xs[:stretch], recurrence.start))

    return seconds_of(run) * len(recurrence.xs) / stretch


def _differentiated(states: Tensor) -> Tensor:
    """So that a backward to all leaves is timed, without a gradient for anybody and with all graphs kept."""
    found, seen, left = [], set(), [states.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [one for one, _ in node.next_functions]
            found += [node.variable] if hasattr(node, "variable") else []
    return torch.autograd.grad(states.sum(), found, retain_graph=True)[0] if found else states


def _ways(job: _Job) -> Iterator[Way]:
    try:
        job = replace(job, recurrence=probed(job.recurrence))
    except ValueError:
        return  # the loop can do what no other way can
    for method in PARALLEL:
        yield Way(method, partial(_is_solved, job, method))


def _is_solved(job: _Job, method: Choice, sweeps: int) -> bool:
    """The states and, where they have one, their gradient."""
    try:
        found = _attempt(job, method, sweeps)
    except ValueError:
        return False  # its Jacobians are too large
    if found.final == len(found.states):
        _differentiated(_with_gradients(job, found.states, method))
    return found.final == len(found.states)
