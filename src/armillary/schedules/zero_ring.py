"""The ring whose workers hold a stage's weights only where they are owned or used just now.

Source: Fournier & Oyallon, 2024; sharded weights: ZeRO-3 (Rajbhandari et al., 2020).
"""

from armillary.plans.units import bytes_text
from armillary.schedules.costs import held_copies, mean_copies
from armillary.schedules.cyclic import ring_method, sent_bytes, shared_memory
from armillary.schedules.lower_zero_ring import lent_messages
from armillary.schedules.method import Planned, ScheduleOptions
from armillary.schedules.registry import SCHEDULES


def _copies(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """Master weights and state at the owner; elsewhere what is there for its use."""
    return (1 + slots) / workers + mean_copies(options.schedule(), stage, options.clip)


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
    sent = sent_bytes(lent_messages(schedule, clip), workers, stages)
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
        messages=lent_messages,
        copies=_copies,
        notes=_notes,
        lends=True,
    ),
)
