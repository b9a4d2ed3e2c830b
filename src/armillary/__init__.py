"""Armillary: plans, runs and checks the training of an ordinary PyTorch model on many workers.

The names are those of `face.py`, which is imported, and torch with it, when the first of them is asked for: the command
line lives in this package too, and answers what needs no torch without it.
"""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.face import (
        CheckpointEvery,
        Choice,
        Link,
        Plan,
        Profile,
        Run,
        Topology,
        advise,
        assumptions_of,
        attach,
        auto_plan,
        check,
        coded_sum,
        latest_checkpoint,
        measure,
        parallelize,
        plan,
        profile,
        simulate,
        twin,
        verify,
    )

__all__ = [
    "CheckpointEvery",
    "Choice",
    "Link",
    "Plan",
    "Profile",
    "Run",
    "Topology",
    "advise",
    "assumptions_of",
    "attach",
    "auto_plan",
    "check",
    "coded_sum",
    "latest_checkpoint",
    "measure",
    "parallelize",
    "plan",
    "profile",
    "simulate",
    "twin",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'armillary' has no attribute {name!r}")
    if "armillary.face" in sys.modules:
        return getattr(sys.modules["armillary.face"], name)
    was_on = gc.isenabled()
    gc.disable()  # it would walk all of torch's objects again and again: a third of the seconds that this import takes
    try:
        return getattr(import_module("armillary.face"), name)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return [*globals(), *__all__]
