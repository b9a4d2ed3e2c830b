"""Who sends what to whom, and when: the routes of a ring of workers and of a pipeline of stages.

In a ring every worker runs the whole model on one micro-batch. Gradients of a stage are summed hop by hop in
worker order and the sum goes to the stage's owner, which alone holds its optimizer state. An owner next to last keeps
the sum when it is there and gets the last worker's gradient instead: a + b is b + a bit for bit, and a hop is saved
(with two workers a third of all bytes of the busier one). New weights go from
there to the workers in the order in which they use them. The owner is the first worker that can read weights
the moment they exist, worker ceil(N - jN/K) - 1 for stage j of K equal ones, so owners are spread evenly and
slack 0 needs no hop before the first use. An owner sends on weights when it makes them, everyone else when it
uses them: at most one stage message per worker and tick at slack 0; with slack an owner makes them later, see
`closing`, and with more than two workers may send two or three.

Note [Norms]. Where gradients are clipped by a norm over all stages, one number more travels. In a ring the last worker
makes every sum (none is finished at an owner then), so it knows the norm after its last backward and sends it to every
other owner. In a pipeline each stage adds its square on the way down, behind the last gradient of the step; the whole
goes up again ahead of the first activation that leaves stage 0 after that.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism). Departure: the authors leave states on
every worker.

Whether a schedule leaves the time to know the norm over all stages before weights clipped by it are read.

At slack 0 the last stage is read again while the first still waits for its gradients, so its update cannot wait for the
norm of the whole step. The more slack, the later that reading; where all weights are one step old there is time, unless
stages are very unequal. In a pipeline and a ring the norm has to travel, too, which takes more slack than on a device.

Source: the slack of Fournier & Oyallon's first rule, worked out for every slack and mode. PipeDream-2BW skips clipping.
"""

from itertools import count
from typing import NamedTuple

from armillary.schedules.clipping import Clip
from armillary.schedules.schedule import Kind, Schedule

__all__ = [
    "NORM_BYTES",
    "Closing",
    "carrier",
    "closing",
    "owner_of",
    "refuse_in_pipeline",
    "refuse_in_ring",
    "refuse_on_one_device",
    "sum_path",
    "use",
    "weight_path",
    "workers_of_stages",
]

NORM_BYTES = 8


def owner_of(schedule: Schedule, stage: int) -> int:
    """The worker that holds the master weights and optimizer state of a stage.

    Raises:
        ValueError: workers do not have one micro-batch each, so they form no ring.
    """
    for worker, row in enumerate(schedule.ticks):
        if {action.micro_batch for action in row} != {worker}:
            raise ValueError(f"schedule: {schedule.name} gives worker {worker} other micro-batches; it makes no ring")
    complete = max(schedule.action("B", m, stage).end for m in range(schedule.workers)) - schedule.period
    return next(
        (m for m in range(schedule.workers) if schedule.action("F", m, stage).start >= complete),
        schedule.workers - 1,
    )


def weight_path(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The way of a version of a stage's weights: its owner, then the others in the order of use."""
    start = owner_of(schedule, stage)
    others = (worker for worker in range(schedule.workers) if worker != start)
    return start, *sorted(others, key=lambda worker: use(schedule, worker, stage))


def sum_path(schedule: Schedule, stage: int, clip: Clip | None = None) -> tuple[int, ...]:
    """The workers that add their gradient of a stage to the sum and hand it on; the last of them holds it.

    All of them in order, or all but the last where the owner is the one before: that worker's gradient goes there alone
    (not where norms travel, see Note [Norms]).
    """
    needs_norm = clip is not None and clip.needs_all_stages
    is_next_to_last = owner_of(schedule, stage) == schedule.workers - 2
    return tuple(range(schedule.workers - (is_next_to_last and not needs_norm)))


class Closing(NamedTuple):
    """When an owner steps the optimizer with a stage's gradient of a step: before one of its actions.

    tick: at which the action starts, counted in the step after the gradient's.
    steps: whole steps after that one to which the action belongs.
    action: its number in its step.
    """

    tick: int
    steps: int
    action: int


def closing(schedule: Schedule, stage: int, clip: Clip | None = None) -> Closing:
    """When the owner makes a version of a stage's weights.

    At its own forward of that stage if another worker wants them at once. Else later: the gradient's hop to the owner
    and the weights' hop from it share the time there is, and the sums of the owner's own backward, which are wanted
    sooner, leave before the weights. So: five eighths of the time until they are wanted elsewhere, or, if that is
    earlier, in the forward after the owner's own backward, one stage with each action. Where the owner makes the sum,
    there is no hop of the gradient, and the weights have all of the time. A `clip` that waits for the norm over all
    stages moves it to where that is known.

    Raises:
        ValueError: the weights are wanted before the norm is known.
    """
    start, *others = weight_path(schedule, stage)
    could = schedule.action("F", start, stage).start
    elsewhere = min((use(schedule, worker, stage) for worker in others), default=could)
    wanted = min(use(schedule, worker, stage) for worker in (start, *others))
    if clip is not None and clip.waits:
        could = max(could, schedule.action("B", schedule.workers - 1, 0).end - schedule.period)
    hops = min(1, schedule.workers - 1 - start)
    latest = could + hops * max(0, elsewhere - could) * 5 // 8
    turn = sum(owner_of(schedule, before) == start for before in range(stage))
    after_backward = schedule.ticks[start][turn].start + schedule.period
    if could <= after_backward < latest:
        latest = after_backward
    fitting = [
        Closing(action.start + steps * schedule.period, steps, place)
        for steps in range(1 + min(schedule.staleness[worker][stage] for worker in (start, *others)))
        for place, action in enumerate(schedule.ticks[start])
        if could <= action.start + steps * schedule.period <= wanted
    ]
    if not fitting:
        raise ValueError(
            f"schedule: weights of stage {stage} are wanted at tick {wanted}, and the norm over all stages, by which "
            f"their gradient is to be clipped, is known from tick {could} on"
        )
    return max((found for found in fitting if found.tick <= latest), default=min(fitting))


def carrier(schedule: Schedule) -> int:
    """The micro-batch, counted on from the first of the next step, before whose forward a pipeline's norm goes up."""
    known = max(action.end for row in schedule.ticks for action in row if action.kind == "B")
    starts = [schedule.action("F", m, 0).start for m in range(schedule.micro_batches)]
    return next(
        number
        for number in count()
        if starts[number % len(starts)] + (1 + number // len(starts)) * schedule.period >= known
    )


def workers_of_stages(schedule: Schedule) -> tuple[int, ...]:
    """The worker that runs each stage.

    Raises:
        ValueError: a stage runs on several workers, so they form no pipeline.
    """
    found: dict[int, set[int]] = {}
    for worker, row in enumerate(schedule.ticks):
        for action in row:
            found.setdefault(action.stage, set()).add(worker)
    for stage, several in sorted(found.items()):
        if len(several) > 1:
            raise ValueError(
                f"schedule: {schedule.name} runs stage {stage} on workers {sorted(several)}; it makes no pipeline"
            )
    return tuple(min(found[stage]) for stage in range(schedule.stages))


def use(schedule: Schedule, worker: int, stage: int, kind: Kind = "F") -> int:
    """The tick at which a worker first reads version 0 of a stage in its forward or backward, in the steady state."""
    age = schedule.staleness[worker][stage]
    return schedule.action(kind, worker, stage).start + age * schedule.period


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
