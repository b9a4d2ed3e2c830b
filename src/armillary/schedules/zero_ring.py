"""The ring whose workers hold a stage's weights only where they are owned or used just now.

Source: Fournier & Oyallon, 2024; sharded weights: ZeRO-3 (Rajbhandari et al., 2020).
"""

from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned, held_copies
from armillary.schedules.cyclic import ring_method, shared_memory
from armillary.schedules.registry import SCHEDULES


def _notes(planned: Planned) -> list[str]:
    stages, schedule, clip = planned.stages, planned.schedule, planned.options.clip
    workers, weights = planned.workers, sum(stage.weight_bytes for stage in stages)
    if workers == 1:
        return []
    held = [
        sum(stages[stage].weight_bytes * count for stage, count in copies.items())
        for worker in range(workers)
        for copies in held_copies(schedule, worker, clip)
    ]
    sent = planned.counts.sent_bytes(stages)
    most = f"the fullest worker holds {bytes_text(max(held))} of weights at its peak, of {bytes_text(weights)} in all"
    if max(held) >= weights:
        most += "; that is no less than a plain ring's: take it, or more workers or stages"
    return [
        f"{most}; memory of a stage counts what is under way, gradients too, in the mean over actions. Evaluation and "
        f"checkpoints hold the whole model",
        f"weights and gradients sent per worker and step: {bytes_text(sum(sent) / workers)} round the ring, "
        f"{bytes_text(max(sent))} by the busiest worker; {bytes_text(3 * weights * (workers - 1) / workers)} by fully "
        f"sharded data parallelism (3w(N-1)/N), which is exact and waits for collectives",
        *shared_memory(schedule, stages),
    ]


SCHEDULES.register(
    "zero_ring",
    ring_method(
        notes=_notes,
        lends=True,
    ),
)
