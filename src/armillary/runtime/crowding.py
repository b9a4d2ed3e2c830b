"""Ranks that outnumber the processors of their machine: they share them out, and no thread pushes another aside.

Gloo's event loop wakes up for what comes in and tries the lock of that connection; if a sender holds it, the loop asks
the kernel again at once. On a crowded machine that sender often is who has just been pushed aside by the loop, which
then spins until the sender runs again: with eight ranks on two processors 4,000 times a step and rank, 4 ms of
processor. Under the kernel's policy for batch jobs a wake-up pushes nobody aside, so a sender more often ends what it
began: half the calls, and 0.92 of a step there (`docs/design.md`).

Where as many ranks come on each processor, every rank keeps to one: its loop then cannot spin beside the sender it
waits for, and finds what the sender left in the caches. That is another 0.93 there. Ranks that cannot be dealt out
evenly, or that compute on several threads, are left to the kernel, which evens them out.

Where every thread has a processor nothing is changed: there nothing spins for long, and messages would only be seen to
later.

Source: sched(7), SCHED_BATCH; sched_setaffinity(2); github.com/pytorch/gloo/issues/246 (the spin). Departure: whole
processes change their policy and processors, since the loop of the next group begins under those of the thread which
makes it. Processes that a rank starts meanwhile, such as a loader's workers, begin under them too.
"""

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Quarters", "give_way", "quarters"]

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in every container and network namespace of a machine
THREADS = Path("/proc/self/task")


class Quarters(NamedTuple):
    """What ranks that compare equal share: a machine, and the processors they may run on there."""

    machine: str
    processors: tuple[int, ...]


def quarters() -> Quarters:
    """Those of this process. No processors are named where the system does not tell."""
    name = BOOT.read_text().strip() if BOOT.exists() else platform.node()
    return Quarters(name, tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ())


def give_way(everyones: Sequence[Quarters], rank: int) -> Callable[[], None]:
    """In crowded quarters no thread of this process pushes another aside when it wakes up, and all of them keep to this
    rank's processor, from now on. Returns what takes that back.

    A process that somebody gave a policy of its own keeps it. Needs no privilege; systems without policies are left as
    they are.

    Args:
        everyones: `quarters` in rank order.
    """
    mine = everyones[rank]
    mates = [other for other, theirs in enumerate(everyones) if theirs == mine]
    if not hasattr(os, "SCHED_BATCH") or len(mates) * torch.get_num_threads() <= len(mine.processors):
        return lambda: None
    if os.sched_getscheduler(os.getpid()) != os.SCHED_OTHER:
        return lambda: None
    everywhere = set(mine.processors)
    kept = _dealt(mates.index(rank), len(mates), mine.processors) if torch.get_num_threads() == 1 else everywhere
    _for_threads(os.sched_getscheduler, os.SCHED_OTHER, _become(os.SCHED_BATCH))
    _for_threads(os.sched_getaffinity, everywhere, _keep_to(kept))

    def stop() -> None:
        _for_threads(os.sched_getscheduler, os.SCHED_BATCH, _become(os.SCHED_OTHER))
        _for_threads(os.sched_getaffinity, kept, _keep_to(everywhere))

    return stop


def _dealt(place: int, ranks: int, processors: Sequence[int]) -> set[int]:
    """Those of the rank in this place: one, if as many ranks come on each, else all."""
    return set(processors) if ranks % len(processors) else {processors[place % len(processors)]}


def _become(policy: int) -> Callable[[int], None]:
    return lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(0))


def _keep_to(processors: set[int]) -> Callable[[int], None]:
    return lambda thread: os.sched_setaffinity(thread, processors)


def _for_threads(asked: Callable[[int], Any], answer: Any, change: Callable[[int], None]) -> None:
    """Changes the threads that answer so; what somebody arranged otherwise for one of his own stays."""
    for thread in map(int, os.listdir(THREADS)):
        try:
            if asked(thread) == answer:
                change(thread)
        except OSError:  # ended meanwhile, or a sandbox does not allow it: it is as fast as the kernel makes it
            continue
