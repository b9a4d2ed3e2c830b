"""Gradient accumulation: each worker runs its micro-batches one after the other and keeps one at a time.

On one device it needs less memory than cyclic scheduling and has no delay: the baseline a memory claim must
face.
"""

from armillary.plans.mesh import DATA
from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned, peak_on_one_device
from armillary.schedules.method import Method, OptionRules, Options, Placing
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Schedule, one_pass

__all__ = ["DEFAULT_MICRO_BATCHES", "accumulation"]

DEFAULT_MICRO_BATCHES = 2  # which no number of processes suggests


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


def _defaults(given: Options, workers: int) -> Options:
    """Uncut, unless the user says where to cut."""
    return {"micro_batches": DEFAULT_MICRO_BATCHES, **({} if given.get("points") else {"stages": 1})}


def _notes(planned: Planned) -> list[str]:
    held = bytes_text(peak_on_one_device(planned.schedule, planned.stages))
    return [f"activations at the peak: {held}, those of one micro-batch of {planned.options.micro_batches}"]


SCHEDULES.register(
    "accumulation",
    Method(
        table=lambda options: accumulation(options.micro_batches, options.stages),
        options=OptionRules(
            knows=frozenset({"micro_batches", "stages", "points", "recompute", "clip_norm", "clip_by"}),
            defaults=_defaults,
        ),
        examples=({"workers": 1, "micro_batches": 3}, {"workers": 2, "micro_batches": 4}),
        placement=Placing(DATA),
        replicates_table=True,
        notes=_notes,
    ),
)
