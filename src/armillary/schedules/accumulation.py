"""Gradient accumulation: each worker runs its micro-batches one after the other and keeps one at a time.

On one device it needs less memory than cyclic scheduling and has no delay: the baseline a memory claim must
face.
"""

from armillary.schedules.action import one_pass
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["accumulation"]


@register({"micro_batches": 3, "stages": 2}, {"micro_batches": 4, "stages": 2, "workers": 2})
def accumulation(micro_batches: int, stages: int = 1, workers: int = 1) -> Schedule:
    """`micro_batches` per step in all, the same number on each worker, in order.

    Raises:
        ValueError: the micro-batches do not divide evenly.
    """
    if workers < 1 or micro_batches < 1 or micro_batches % workers:
        raise ValueError(f"accumulation: {micro_batches} micro-batches do not divide over {workers} workers")
    each = micro_batches // workers
    rows = tuple(
        tuple(a for turn in range(each) for a in one_pass(worker * each + turn, stages, start=2 * stages * turn))
        for worker in range(workers)
    )
    return Schedule("accumulation", 2 * stages * each, rows, ((0,) * stages,) * micro_batches)
