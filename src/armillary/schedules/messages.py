"""Who sends what to whom, and when: the routes of a ring of workers and of a pipeline of stages.

In a ring every worker runs the whole model on one micro-batch. Gradients of a stage are summed hop by hop in
worker order and the sum goes to the stage's home, which alone holds its optimizer state. A home next to last keeps
the sum when it is there and gets the last worker's gradient instead: a + b is b + a bit for bit, and a hop is saved
(with two workers a third of all bytes of the busier one). New weights go from
there to the workers in the order in which they use them. The home is the first worker that can read weights
the moment they exist, worker ceil(N - jN/K) - 1 for stage j of K equal ones, so homes are spread evenly and
slack 0 needs no hop before the first use. A home sends on weights when it makes them, everyone else when it
uses them: at most one stage message per worker and tick at slack 0; with slack a home makes them later, half
of the slack after it could, and may send two.

Source: Fournier & Oyallon, 2024 (point-to-point data parallelism). Departure: the authors leave states on
every worker.
"""

from itertools import pairwise
from typing import Literal, NamedTuple

from armillary.schedules.action import Action
from armillary.schedules.schedule import Schedule

__all__ = ["Message", "closing", "home", "lead", "pipeline_messages", "ring_messages", "sum_path", "weight_path"]


Content = Literal["partial gradient", "gradient", "weights", "activation", "activation gradient"]


class Message(NamedTuple):
    """One stage's tensors on their way.

    tick: at which the sender's action starts with which they are sent, counted in that step.
    lag: ticks from there until the receiver's action that needs them starts.
    """

    tick: int
    lag: int
    sender: int
    receiver: int
    content: Content
    stage: int


def home(schedule: Schedule, stage: int) -> int:
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
    """The way of a version of a stage's weights: its home, then the others in the order of use."""
    start = home(schedule, stage)
    others = (worker for worker in range(schedule.workers) if worker != start)
    return start, *sorted(others, key=lambda worker: _use(schedule, worker, stage))


def sum_path(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The workers that add their gradient of a stage to the sum and hand it on; the last of them holds it.

    All of them in order, or all but the last where the home is the one before: that worker's gradient goes there alone.
    """
    is_next_to_last = home(schedule, stage) == schedule.workers - 2
    return tuple(range(schedule.workers - is_next_to_last))


def closing(schedule: Schedule, stage: int) -> Action:
    """The home's action before which it steps the optimizer with the gradient of the step before.

    Its own forward of that stage if the weights are wanted at once; else half of the time until they are
    later, so that the gradient's hop to the home and the weights' hop from it have equal slack. Where the sum is made
    at the home there is no such hop, and the weights have all of it.
    """
    start, *others = weight_path(schedule, stage)
    could = schedule.action("F", start, stage).start
    wanted = min(_use(schedule, worker, stage) for worker in (start, *others))
    hops = min(1, schedule.workers - 1 - start)
    latest = could + hops * max(0, wanted - could) // 2
    return max(action for action in schedule.ticks[start] if action.start <= latest)


def ring_messages(schedule: Schedule) -> list[Message]:
    """All messages of one step of a ring, in order of ticks."""
    found: list[Message] = []
    last = schedule.workers - 1
    for stage in range(schedule.stages):
        done = [schedule.action("B", worker, stage).start for worker in range(schedule.workers)]
        for worker in sum_path(schedule, stage)[:-1]:
            lag = done[worker + 1] - done[worker]
            found.append(Message(done[worker], lag, worker, worker + 1, "partial gradient", stage))
        path, made = weight_path(schedule, stage), closing(schedule, stage).start
        if path[0] != last:
            found.append(Message(done[last], made + schedule.period - done[last], last, path[0], "gradient", stage))
        for place, (sender, receiver) in enumerate(pairwise(path)):
            sent = _use(schedule, sender, stage) if place else made
            lag = _use(schedule, receiver, stage) - sent
            tick = schedule.action("F", sender, stage).start if place else made
            found.append(Message(tick, lag, sender, receiver, "weights", stage))
    return sorted(found)


def lead(schedule: Schedule, message: Message) -> int:
    """How many actions the receiver begins between the sending and the use, which is the last of them; at least 1."""

    def begun(tick: int) -> int:
        return sum((tick - action.start) // schedule.period for action in schedule.ticks[message.receiver])

    return max(1, begun(message.tick + message.lag) - begun(message.tick))


def pipeline_messages(schedule: Schedule) -> list[Message]:
    """All messages of one step of a pipeline, in order of ticks.

    Raises:
        ValueError: a stage runs on several workers, so they form no pipeline.
    """
    found: list[Message] = []
    for worker, row in enumerate(schedule.ticks):
        if {action.stage for action in row} != {worker}:
            raise ValueError(f"schedule: {schedule.name} gives worker {worker} other stages; it makes no pipeline")
        for action in row:
            receiver = worker + 1 if action.kind == "F" else worker - 1
            if 0 <= receiver < schedule.workers:
                lag = schedule.action(action.kind, action.micro_batch, receiver).start - action.start
                content: Content = "activation" if action.kind == "F" else "activation gradient"
                found.append(Message(action.start, lag, worker, receiver, content, worker))
    return sorted(found)


def _use(schedule: Schedule, worker: int, stage: int) -> int:
    """The tick at which a worker first reads version 0 of a stage, in the steady state."""
    age = schedule.staleness[worker][stage]
    return schedule.action("F", worker, stage).start + age * schedule.period
