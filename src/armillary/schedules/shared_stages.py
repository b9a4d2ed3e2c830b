"""N stages on N(N+1)/2 processes; micro-batches go from process to process, stage by stage.

Source: Fournier & Oyallon, 2024 (data and model parallelism with shared devices); the mapping is `shared.py`.
"""

from armillary.facts.profile_table import bytes_text
from armillary.schedules.activations import peak_over_workers, stagger
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.method import Method, Options, Planned, ScheduleOptions, Traffic
from armillary.schedules.norm_in_time import refuse_on_one_device
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Schedule
from armillary.schedules.shared import Sharing, workers_on
from armillary.schedules.shared_messages import shared_messages
from armillary.schedules.weights_held import is_stale

ALIKE = 1.05  # ratio of two times up to which they are called the same


def _table(options: ScheduleOptions) -> Schedule:
    return cyclic(options.micro_batches, options.stages, options.slack)


def _implied(given: Options, workers: int) -> Options:
    count = workers_on(workers)
    return {"stages": count, "micro_batches": count}


def _owner(options: ScheduleOptions, stage: int) -> int:
    return Sharing(_table(options)).owner(stage)


def _traffic(options: ScheduleOptions, stage: int) -> Traffic:
    """Devices change from step to step; after a rotation they come again."""
    sharing = Sharing(_table(options))
    turn = sharing.rotation(stage)
    found = [message for step in range(turn) for message in shared_messages(sharing, step, options.clip)]
    return Traffic(turn, [message for message in found if message.stage == stage])


def _copies(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """Weights and a gradient on each device of the stage, and an older version where one is read; the owner's state.

    The owner's gradient goes when it steps, but a copy of its new weights is on its way then. Where all weights are a
    step old, letters wait longer: up to a sixth more was alive (N = 3, slack 3).
    """
    devices = len(Sharing(_table(options)).ranks(stage))
    return ((2 + is_stale(options, stage)) * devices + slots) / workers


def _notes(planned: Planned) -> list[str]:
    """Beside the N^2 devices it is half of, and the pipeline, which wants N."""
    options, stages = planned.options, planned.stages
    count, sharing = options.stages, Sharing(planned.schedule)
    if count == 1:
        return []
    flops = [float(stage.flops) for stage in stages]
    pace = stagger(flops) or 1.0
    busy = sum(flops) / pace / sharing.devices if sum(flops) else sharing.utilisation
    piped = sum(flops) / (count * max(flops)) if max(flops) else 1.0
    slower = max(flops) / pace if max(flops) else 1.0
    verdict = f"As fast on {count} devices, the pipeline is better unless those do not fit"
    if slower > ALIKE:
        verdict = f"With this cut the pipeline's {count} devices take {slower:.2f} times as long"
    most = max(stage.activation_bytes for stage in stages)
    schedule_piped = cyclic_pipeline(count, count, options.slack)
    fullest = max(peak_over_workers(schedule_piped, stages, worker) for worker in range(count))
    return [
        f"{sharing.devices} devices for {count} workers: stage j has {count} - j of them, micro-batch number m "
        f"(counted through all steps) runs on m mod ({count} - j) of them; without sharing they would be {count**2}",
        f"utilisation: {busy:.0%} of {sharing.devices} devices with this cut ({sharing.utilisation:.0%} with equal "
        f"stages), {1 / count:.0%} of {count**2} without sharing; a pipeline reaches {piped:.0%} of {count}",
        f"activations per device: {bytes_text(most)} at most, one stage of one micro-batch; {bytes_text(fullest)} in "
        f"the pipeline's fullest. {verdict}",
    ]


SCHEDULES.register(
    "shared_stages",
    Method(
        table=_table,
        knows=frozenset({"slack", "micro_batches", "stages", "points", "recompute", "clip_norm", "clip_by"}),
        placement=Sharing,
        no_edges="",
        examples=({"workers": 3}, {"workers": 6, "slack": 1}),
        implied=_implied,
        refuse_late_norm=refuse_on_one_device,
        owner=_owner,
        traffic=_traffic,
        copies=_copies,
        peak=lambda options, stages: max(stage.activation_bytes for stage in stages),
        pace=lambda options, stages: stagger(stages) * options.micro_batches,
        notes=_notes,
        draw=lambda options: str(Sharing(_table(options))),
        follows=("micro_batches",),
    ),
)
