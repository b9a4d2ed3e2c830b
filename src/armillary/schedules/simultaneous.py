"""Plain data parallelism: all workers run the same stage at the same tick, with the newest weights."""

from armillary.schedules.action import one_pass
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["simultaneous"]


@register({"workers": 3, "stages": 2}, {"workers": 1})
def simultaneous(workers: int, stages: int = 1) -> Schedule:
    """N workers, K stages, one micro-batch a worker; every forward waits for the step before it."""
    rows = tuple(one_pass(worker, stages, start=0) for worker in range(workers))
    return Schedule("simultaneous", 2 * stages, rows, ((0,) * stages,) * workers)
