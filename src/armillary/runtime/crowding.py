"""Ranks that outnumber the processors of their machine: a thread that wakes up lets the running one end its slice.

Gloo's event loop wakes up for what comes in and tries the lock of that connection; if a sender holds it, the loop asks
the kernel again at once. On a crowded machine that sender often is who has just been pushed aside by the loop, which
then spins until the sender runs again: with eight ranks on two processors 4,000 times a step and rank, 4 ms of
processor. Under the kernel's policy for batch jobs a wake-up pushes nobody aside, so a sender more often ends what it
began: half the calls, and 0.92 of a step there (`docs/design.md`). Where every thread has a processor nothing is
changed: there nothing spins for long, and messages would only be seen to later.

Source: sched(7), SCHED_BATCH; github.com/pytorch/gloo/issues/246 (the spin). Departure: whole processes change their
policy, since the loop of the next group begins under that of the thread which makes it.
"""

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = ["give_way", "machine"]

BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in every container and network namespace of a machine
THREADS = Path("/proc/self/task")


def machine() -> str:
    """A name for it that no other machine has."""
    return BOOT.read_text().strip() if BOOT.exists() else platform.node()


def give_way(machines: Sequence[str]) -> Callable[[], None]:
    """On a crowded machine no thread of this process pushes another aside when it wakes up, from now on. Returns what
    takes that back.

    A process that somebody gave a policy of its own keeps it. Needs no privilege; systems without policies are left as
    they are.

    Args:
        machines: of every rank its `machine`.
    """
    if not hasattr(os, "sched_setscheduler") or not _is_crowded(machines.count(machine())):
        return lambda: None
    if os.sched_getscheduler(os.getpid()) != os.SCHED_OTHER:
        return lambda: None
    _change(os.SCHED_OTHER, os.SCHED_BATCH)
    return lambda: _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _is_crowded(ranks: int) -> bool:
    """Whether so many ranks compute on more threads than there are processors."""
    return ranks * torch.get_num_threads() > len(os.sched_getaffinity(0))


def _change(before: int, after: int) -> None:
    for thread in map(int, os.listdir(THREADS)):
        try:
            if os.sched_getscheduler(thread) == before:
                os.sched_setscheduler(thread, after, os.sched_param(0))
        except ProcessLookupError:  # ended meanwhile
            continue
