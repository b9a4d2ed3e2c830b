"""Cyclic data parallelism on a ring of N workers: a micro-batch each, gradients and weights go from worker to worker.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism).
"""

from armillary.plans.advice import Advice, Situation, advises, planned_in_stages
from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned
from armillary.schedules.cyclic import ring_method, shared_memory
from armillary.schedules.registry import SCHEDULES

__all__ = ["DOMINATED_WORKERS"]

DOMINATED_WORKERS = range(3, 10)  # where the ring's extra bytes weigh more than the all-reduce's extra hops


def _notes(planned: Planned) -> list[str]:
    workers, weights = planned.workers, sum(stage.weight_bytes for stage in planned.stages)
    if workers == 1:
        return []
    sent = planned.counts.sent_bytes(planned.stages)
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
