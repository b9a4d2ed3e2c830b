"""Whether ranks hold alike what a plan keeps alike, asked where weights leave a run: save, export, evaluate, close.

Complete there, at the cost of one pass over the parameters; a loop's own steps cannot pay for that (`in_step.py`).
"""

import sys

from armillary.runtime.hybrid.drift import Alikeness, compare, warn
from armillary.session.job import Job

__all__ = ["is_apart", "refuse_apart", "unless_it_ends_an_error"]


def is_apart(run: Job, call: str) -> Alikeness:
    """Collective, between two steps. Rounding is warned of here; an error is the caller's to raise."""
    with run.transport.unrecorded():
        comparison = compare(run.alike(), run.transport, f"{call}: after step {run.transport.step}")
    warn(comparison, run.transport)
    return comparison


def refuse_apart(run: Job, call: str) -> None:
    """Collective, between two steps.

    Raises:
        RuntimeError: ranks hold a parameter otherwise that the plan keeps alike. On every rank.
    """
    if error := is_apart(run, call).error:
        raise RuntimeError(f"rank {run.rank}: {error}")


def unless_it_ends_an_error(run: Job, call: str) -> str:
    """Collective: as `is_apart`, but nothing is compared where any rank is about to end an error. Empty where all is
    well."""
    with run.transport.unrecorded():
        is_error = any(run.transport.share(sys.exc_info()[0] is not None))
    return "" if is_error else is_apart(run, call).error
