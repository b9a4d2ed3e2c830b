"""Cyclic data parallelism on a ring of N workers: a micro-batch each, gradients and weights go from worker to worker.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism).
"""

from armillary.plans.advice import Advice, Situation, advises, planned_in_stages
from armillary.plans.units import bytes_text
from armillary.schedules.cyclic import ring_method, sent_bytes, shared_memory
from armillary.schedules.method import Planned, ScheduleOptions
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.routes import owner_of, ring_messages

__all__ = ["DOMINATED_WORKERS"]

DOMINATED_WORKERS = range(3, 10)  # where the ring's extra bytes weigh more than the all-reduce's extra hops


def _copies(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """A copy and a gradient everywhere; state at the owner, and an older version where it reads one."""
    schedule = options.schedule()
    return 2 + (schedule.staleness[owner_of(schedule, stage)][stage] + slots) / workers


def _notes(planned: Planned) -> list[str]:
    workers, weights = planned.workers, sum(stage.weight_bytes for stage in planned.stages)
    if workers == 1:
        return []
    sent = sent_bytes(ring_messages(planned.schedule, planned.options.clip), workers, planned.stages)
    reduced = 2 * weights * (workers - 1) / workers
    figures = (
        f"weights and gradients sent per worker and step: {bytes_text(sum(sent) / workers)} round the ring, "
        f"{bytes_text(max(sent))} by the busiest worker; {bytes_text(reduced)} by a delayed all-reduce (2w(N-1)/N, w = "
        f"{bytes_text(weights)}), which is one step late everywhere ({planned.schedule.stale_share:.0%} here)"
    )
    if workers in DOMINATED_WORKERS and max(sent) > reduced:
        figures += (
            f". With {workers} workers the delayed all-reduce is the better plan where bandwidth is what costs; the "
            f"ring's gains are its even traffic, its missing collective and its fresher weights"
        )
    return [figures, *shared_memory(planned.schedule, planned.stages)]


SCHEDULES.register(
    "ring",
    ring_method(
        messages=ring_messages,
        copies=_copies,
        notes=_notes,
        examples=(
            {"workers": 3},
            {"workers": 2, "stages": 4, "slack": 1},
            {"workers": 3, "costs": [[1, 2], [2, 5], [1, 1]]},
        ),
    ),
)


@advises("Cyclic Data Parallelism", "micro-batches staggered by one delay", "methods/cyclic.md")
def _advice(situation: Situation) -> Advice:
    return planned_in_stages(situation, "ring", micro_batches=None)
