"""What rings have in common: a micro-batch a process, all stages on each, an owner for each stage's optimizer state."""

from collections.abc import Callable, Sequence

from armillary.facts.mesh import DATA
from armillary.facts.profile_table import bytes_text
from armillary.schedules.activations import peak_over_workers
from armillary.schedules.clipping import Clip
from armillary.schedules.cyclic import cyclic
from armillary.schedules.messages import NORM_BYTES, Message, owner_of
from armillary.schedules.method import Method, Options, Planned, ScheduleOptions, Traffic
from armillary.schedules.norm_in_time import refuse_in_ring
from armillary.schedules.schedule import Schedule
from armillary.schedules.stage_load import StageLoad

__all__ = ["ring_method", "sent_bytes", "shared_memory"]

RING_OPTIONS = frozenset({"slack", "micro_batches", "stages", "points", "costs", "clip_norm", "clip_by"})


def ring_method(
    messages: Callable[[Schedule, Clip | None], list[Message]],
    copies: Callable[[ScheduleOptions, int, int, float], float],
    notes: Callable[[Planned], list[str]],
    examples: tuple[Options, ...] = ({"workers": 3}, {"workers": 2, "stages": 4, "slack": 1}),
    lends: bool = False,
) -> Method:
    """A ring's registry entry; messages: of a step of the whole ring; the rest as in `Method`."""

    def traffic(options: ScheduleOptions, stage: int) -> Traffic:
        found = messages(options.schedule(), options.clip)
        return Traffic(1, [message for message in found if message.stage == stage])

    return Method(
        table=_table,
        knows=RING_OPTIONS,
        examples=examples,
        axis=DATA,
        lends=lends,
        keeps_own_statistics=True,
        no_edges="weights and gradients go from process to process, activations stay where they are made",
        implied=_one_each,
        refuse_late_norm=refuse_in_ring,
        owner=_owner,
        traffic=traffic,
        copies=copies,
        notes=notes,
        follows=("micro_batches",),
    )


def _one_each(given: Options, workers: int) -> Options:
    return {"micro_batches": workers}


def _table(options: ScheduleOptions) -> Schedule:
    return cyclic(options.micro_batches, options.stages, options.slack, options.costs or None)


def _owner(options: ScheduleOptions, stage: int) -> int:
    return owner_of(options.schedule(), stage)


def sent_bytes(messages: Sequence[Message], workers: int, stages: Sequence[StageLoad]) -> list[int]:
    """Of each worker in a step: stages go whole, norms are one number."""
    sent = [0] * workers
    for message in messages:
        sent[message.sender] += stages[message.stage].weight_bytes if message.content != "norm" else NORM_BYTES
    return sent


def shared_memory(schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    alone, together = sum(stage.activation_bytes for stage in stages), peak_over_workers(schedule, stages)
    return [
        f"one worker's activations peak at {bytes_text(alone)} as in plain data parallelism; only their sum over the "
        f"{schedule.workers} workers is lower, {bytes_text(together)} against {bytes_text(alone * schedule.workers)}"
    ]
