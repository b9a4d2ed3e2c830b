"""Plain data parallelism: all workers run the same stage at the same tick, with the newest weights."""

from armillary.plans.mesh import DATA
from armillary.schedules.method import USER_LOOP, Method, OptionRules, Placing
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Schedule, one_pass

__all__ = ["simultaneous"]


def simultaneous(workers: int, stages: int = 1) -> Schedule:
    """N workers, K stages, one micro-batch a worker; every forward waits for the step before it."""
    rows = tuple(one_pass(worker, stages, start=0) for worker in range(workers))
    return Schedule("simultaneous", 2 * stages, rows, ((0,) * stages,) * workers)


SCHEDULES.register(
    "simultaneous",
    Method(
        table=lambda options: simultaneous(options.micro_batches),
        options=OptionRules(implied=lambda given, workers: {"micro_batches": workers}, follows=("micro_batches",)),
        examples=({"workers": 3}, {"workers": 1}),
        placement=Placing(DATA),
        step_mode=USER_LOOP,
        is_cut=False,
    ),
)
