"""The fastest way for a system, by a trial on its first call. It is kept by model, shape, type and device.

One unknown, one sweep and three windows are timed; then each way solves the system, within the sweeps by which it can
still win.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from armillary.plans.registry import Choice
from armillary.solvers.methods import IN_ORDER, METHODS, completed
from armillary.solvers.system import Solved, System

__all__ = ["Way", "keep", "picked", "seconds_of", "solved_by_trial"]

GAIN = 0.95  # a way must take at most this share of the best so far: timings scatter
SHARES = (16, 8, 4)  # of all unknowns, that a window may be
KEPT: WeakKeyDictionary[Any, dict[Any, Choice]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Way:
    """
    Args of note:
        run: solves it within so many sweeps, and says whether they were enough.
    """

    method: Choice
    run: Callable[[int], bool]


def solved_by_trial(system: System, owner: object, most_sweeps: int) -> Solved:
    key = (tuple(system.start.shape), system.start.dtype, system.start.device, system.tolerance)
    method = picked(owner, key, lambda: _in_order_seconds(system), _ways(system), most_sweeps)
    solved = completed(system, method, most_sweeps)
    if solved.why:
        keep(owner, key, IN_ORDER)  # it settled in the trial and did not now
    return solved


def picked(
    owner: object, key: Any, in_order_seconds: Callable[[], float], ways: Iterable[Way], most_sweeps: int
) -> Choice:
    """What was kept for this owner and key, or the winner of a trial, which is printed."""
    if found := KEPT.get(_identity(owner), {}).get(key):
        return found
    loop_seconds = in_order_seconds()
    best, best_seconds = IN_ORDER, loop_seconds
    for way in ways:
        seconds = _seconds(way.run, most_sweeps, GAIN * best_seconds)
        if seconds is not None and seconds <= GAIN * best_seconds:
            best, best_seconds = way.method, seconds
    gain = f"{loop_seconds / best_seconds:.1f} x as fast as in order" if best is not IN_ORDER else "no way was faster"
    print(f"auto: {best} won, {gain} ({best_seconds:.3g} s, in order {loop_seconds:.3g} s)")
    keep(owner, key, best)
    return best


def keep(owner: object, key: Any, method: Choice) -> None:
    KEPT.setdefault(_identity(owner), {})[key] = method


def _identity(owner: object) -> object:
    """A module is itself. Functions that are defined anew for every call have their code in common."""
    function = getattr(owner, "__func__", owner)
    return owner if isinstance(owner, nn.Module) else getattr(function, "__code__", type(owner))


def _ways(system: System) -> Iterator[Way]:
    unknowns = len(system)
    methods = [Choice("incremental")] if system.begin is not None else []
    methods += [Choice("jacobi")]
    methods += [
        Choice("gs_jacobi", {"window": one}) for one in sorted({unknowns // share for share in SHARES} - {0, 1})
    ]
    for method in methods if unknowns > 1 else ():
        yield Way(method, partial(_is_solved, system, method))


def _is_solved(system: System, method: Choice, sweeps: int) -> bool:
    return METHODS[method.name](system, sweeps, **method.options).final == len(system)


def _in_order_seconds(system: System) -> float:
    middle = len(system) // 2
    return len(system) * seconds_of(lambda: system.evaluate(system.start, slice(middle, middle + 1)))


def _seconds(run: Callable[[int], bool], most_sweeps: int, limit_seconds: float) -> float | None:
    """What a solution takes; None where no more sweeps than fit into the limit are not enough."""
    sweeps, taken = 1, []
    for turn in range(5):  # a sweep warms up, another is timed; then the whole, three times
        began = time.perf_counter()
        is_solved = run(sweeps)
        _wait()
        taken.append(time.perf_counter() - began)
        if turn == 1:
            sweeps = min(most_sweeps, int(2 * limit_seconds / min(taken)))  # one may have been timed too long
        if sweeps < 1 or (turn > 1 and not is_solved):
            return None
    return min(taken[2:])


def seconds_of(call: Callable[[], object]) -> float:
    """The shortest of three, after one that warms up."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        call()
        _wait()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
