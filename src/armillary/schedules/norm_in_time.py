"""Whether a schedule leaves the time to know the norm over all stages before weights clipped by it are read.

At slack 0 the last stage is read again while the first still waits for its gradients, so its update cannot wait for the
norm of the whole step. The more slack, the later that reading; where all weights are one step old there is time, unless
stages are very unequal. In a pipeline and a ring the norm has to travel, too, which takes more slack than on a device.

Source: the slack of Fournier & Oyallon's first rule, worked out for every slack and mode. PipeDream-2BW skips clipping.
"""

from armillary.schedules.clipping import Clip
from armillary.schedules.messages import carrier, closing
from armillary.schedules.schedule import Schedule

__all__ = ["refuse_in_pipeline", "refuse_in_ring", "refuse_on_one_device"]

_REMEDY = "take more slack, or clip by stage or previous"


def refuse_on_one_device(schedule: Schedule, clip: Clip | None) -> None:
    """
    Raises:
        ValueError: a forward reads weights before the last gradient of the step that makes them is there.
    """
    if clip is None or not clip.waits:
        return
    known = max(action.end for row in schedule.ticks for action in row)
    for row in schedule.ticks:
        for action in row:
            age = schedule.staleness[action.micro_batch][action.stage]
            read = action.start + (1 + age) * schedule.period
            if action.kind == "F" and read < known:
                raise ValueError(
                    f"schedule: cannot clip by the global norm: micro-batch {action.micro_batch} reads new weights of "
                    f"stage {action.stage} at tick {read}, the norm is known from tick {known} on; {_REMEDY}"
                )


def refuse_in_pipeline(schedule: Schedule, clip: Clip | None) -> None:
    """
    Raises:
        ValueError: a forward before the one that brings the norm reads weights that wait for it.
    """
    if clip is None or not clip.waits:
        return
    number = carrier(schedule)
    for micro_batch, ages in enumerate(schedule.staleness):
        for stage, age in enumerate(ages):
            if micro_batch + age * schedule.micro_batches < number:
                raise ValueError(
                    f"schedule: cannot clip by the global norm: micro-batch {micro_batch} reads new weights of stage "
                    f"{stage}, the norm comes with micro-batch {number}, counted on from it; {_REMEDY}"
                )


def refuse_in_ring(schedule: Schedule, clip: Clip | None) -> None:
    """
    Raises:
        ValueError: a stage's new weights are wanted before its owner can know the norm.
    """
    for stage in range(schedule.stages):
        try:
            closing(schedule, stage, clip)
        except ValueError as error:
            raise ValueError(f"{error}; {_REMEDY}") from None
