"""Data parallelism one step late: a step begins while the gradients of the last one are being reduced.

The rule of cyclic data parallelism with slack >= N, by a collective instead of a ring: its honest rival.

Source: Pipe-SGD (Li et al., 2018) with width two; delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from armillary.schedules.action import one_pass
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["delayed_all_reduce"]


@register({"workers": 2, "stages": 2})
def delayed_all_reduce(workers: int, stages: int = 1) -> Schedule:
    """All workers at the same tick, all weights one step old."""
    rows = tuple(one_pass(worker, stages, start=0) for worker in range(workers))
    return Schedule("delayed_all_reduce", 2 * stages, rows, ((1,) * stages,) * workers)
