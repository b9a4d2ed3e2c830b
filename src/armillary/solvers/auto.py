"""The fastest way for a system, by a trial on its first call. It is kept by model, shape, type and device.

One unknown, one sweep and three windows are timed; then each way solves the system, as long as it can still win.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from armillary.facts.choice import Choice
from armillary.solvers.methods import IN_ORDER, METHODS, completed
from armillary.solvers.system import Solved, System

__all__ = ["Way", "keep", "picked", "seconds_of", "solved_by_trial"]

GAIN = 0.95  # a way must take at most this share of the best so far: timings scatter
KEPT: WeakKeyDictionary[Any, dict[Any, Choice]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Way:
    """
    Args of note:
        seconds: given how many it may take, how many it took; None if it did not end within them.
    """

    method: Choice
    seconds: Callable[[float], float | None]


def solved_by_trial(system: System, owner: object, most_sweeps: int) -> Solved:
    key = (tuple(system.start.shape), system.start.dtype, system.start.device, system.tolerance)
    method = picked(owner, key, lambda: _in_order_seconds(system), _ways(system, most_sweeps))
    solved = completed(system, method, most_sweeps)
    if solved.why:
        keep(owner, key, IN_ORDER)  # it settled in the trial and did not now
    return solved


def picked(owner: object, key: Any, in_order: Callable[[], float], ways: Iterable[Way]) -> Choice:
    """What was kept, or the winner of a trial, which is printed.

    Args:
        in_order: gives the seconds of a loop, from a part of it.
        ways: the others, tried by turns.
    """
    if found := KEPT.get(_identity(owner), {}).get(key):
        return found
    loop_seconds = in_order()
    best, best_seconds = IN_ORDER, loop_seconds
    for way in ways:
        seconds = way.seconds(GAIN * best_seconds)
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


def _in_order_seconds(system: System) -> float:
    middle = len(system) // 2
    return len(system) * seconds_of(lambda: system.evaluate(system.start, slice(middle, middle + 1)))


def _ways(system: System, most_sweeps: int) -> Iterator[Way]:
    unknowns = len(system)
    if unknowns < 2:
        return
    if system.begin is not None:
        yield Way(Choice("incremental"), lambda _: _incremental_seconds(system))
    yield Way(Choice("jacobi"), partial(_seconds, system, Choice("jacobi"), unknowns, most_sweeps))
    for window in sorted({unknowns // share for share in (4, 8, 16)} - {0, 1}, reverse=True):
        one = Choice("gs_jacobi", {"window": window})
        yield Way(one, partial(_seconds, system, one, window, most_sweeps))


def _incremental_seconds(system: System) -> float:
    """Its first steps are no shorter than later ones where a cache has its full size from the start."""
    assert system.begin is not None
    step, taken, last = system.begin(), [], None
    for t in range(min(len(system), 16)):
        began = time.perf_counter()
        last = step(t, last)
        taken.append(time.perf_counter() - began)
    return len(system) * sorted(taken)[len(taken) // 2]


def _seconds(system: System, method: Choice, evaluated: int, most_sweeps: int, limit_seconds: float) -> float | None:
    """Solves it, if as many sweeps as fit into the limit do."""
    at = slice(0, evaluated)
    sweep = seconds_of(lambda: system.evaluate(system.start, at)) * len(system) / evaluated
    fit = min(most_sweeps, int(limit_seconds / sweep))
    if fit < 1:
        return None
    began = time.perf_counter()
    found = METHODS[method.name](system, fit, **method.options)
    _wait(system.start.device)
    return time.perf_counter() - began if found.final == len(system) else None


def seconds_of(call: Callable[[], torch.Tensor]) -> float:
    """The shortest of three, after one that warms up."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        _wait(call().device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
