"""What crosses in a step of a ring, a pipeline and shared stages, by formulas: the truth that lists are held against.

Nothing here reads a list of instructions.
"""

from itertools import pairwise
from typing import NamedTuple

from armillary.schedules.instructions import TOKENS
from armillary.schedules.lower_zero_ring import unshards
from armillary.schedules.routes import carrier, closing, owner_of, sum_path, use, weight_path, workers_of_stages


class Message(NamedTuple):
    """One stage's tensors on their way, or one number: a norm, squared.

    tick: at which the sender's action starts with which they are sent, counted in that step.
    lag: ticks from there until the receiver's action that needs them starts.
    """

    tick: int
    lag: int
    sender: int
    receiver: int
    content: str
    stage: int


def ring_messages(schedule, clip=None):
    """All messages of one step of a ring, in order of ticks."""
    found = []
    for stage in range(schedule.stages):
        path, made = weight_path(schedule, stage), closing(schedule, stage, clip)
        for place, (sender, receiver) in enumerate(pairwise(path)):
            sent = use(schedule, sender, stage) if place else made.tick
            lag = use(schedule, receiver, stage) - sent
            tick = schedule.action("F", sender, stage).start if place else made.tick - made.steps * schedule.period
            found.append(Message(tick, lag, sender, receiver, "weights", stage))
    return sorted([*found, *gradient_messages(schedule, clip)])


def gradient_messages(schedule, clip=None):
    """The sums of one step on their way from worker to worker and to their owners, and the norms."""
    last = schedule.workers - 1
    for stage in range(schedule.stages):
        done = [schedule.action("B", worker, stage).start for worker in range(schedule.workers)]
        for worker in sum_path(schedule, stage, clip)[:-1]:
            lag = done[worker + 1] - done[worker]
            yield Message(done[worker], lag, worker, worker + 1, "partial gradient", stage)
        goal, made = owner_of(schedule, stage), closing(schedule, stage, clip).tick
        if goal != last:
            yield Message(done[last], made + schedule.period - done[last], last, goal, "gradient", stage)
    yield from _ring_norms(schedule, clip)


def _ring_norms(schedule, clip):
    """One to each owner but the last worker, for the first of its stages to be updated; see Note [Norms]."""
    if clip is None or not clip.needs_all_stages:
        return
    sent, last = schedule.action("B", schedule.workers - 1, 0).start, schedule.workers - 1
    owners = {}
    for stage in range(schedule.stages):
        owners.setdefault(owner_of(schedule, stage), []).append((closing(schedule, stage, clip).tick, stage))
    for worker, closings in owners.items():
        if worker != last:
            made, stage = min(closings)
            steps = 1 if clip.waits else 2  # from the step of the norm to the one in which it is used
            yield Message(sent, made + steps * schedule.period - sent, last, worker, "norm", stage)


def pipeline_messages(schedule, clip=None):
    """All messages of one step of a pipeline, in order of ticks.

    Raises:
        ValueError: a stage runs on several workers, so they form no pipeline.
    """
    found = []
    workers = workers_of_stages(schedule)
    for worker, row in enumerate(schedule.ticks):
        for action in row:
            after = action.stage + (1 if action.kind == "F" else -1)
            is_back = action.kind == "B" and after in schedule.uncoupled
            if 0 <= after < schedule.stages and workers[after] != worker and not is_back:
                lag = schedule.action(action.kind, action.micro_batch, after).start - action.start
                content = "activation" if action.kind == "F" else "activation gradient"
                found.append(Message(action.start, lag, worker, workers[after], content, action.stage))
    needs_norm = clip is not None and clip.needs_all_stages
    return sorted([*found, *(_pipeline_norms(schedule, workers) if needs_norm else ())])


def _pipeline_norms(schedule, workers):
    """Down the stages, and up again from worker to worker; see Note [Norms]."""
    last, number = schedule.micro_batches - 1, carrier(schedule)
    later = (1 + number // schedule.micro_batches) * schedule.period
    done = [schedule.action("B", last, stage).start for stage in range(schedule.stages)]
    goes = [schedule.action("F", number % schedule.micro_batches, j).start + later for j in range(schedule.stages)]
    for lower, upper in pairwise(range(schedule.stages)):
        if workers[lower] != workers[upper]:
            yield Message(done[upper], done[lower] - done[upper], workers[upper], workers[lower], "norm", upper)
    for lower, upper in pairwise(dict.fromkeys(workers)):
        below, above = workers.index(lower), workers.index(upper)
        sent = goes[below] if below else done[0]
        yield Message(sent, goes[above] - sent, lower, upper, "norm", below)


def lent_messages(schedule, clip=None):
    """All messages of one step, in order of ticks.

    Raises:
        ValueError: weights more than one step old, or workers that form no ring.
    """
    found = [
        Message(one.leaves % schedule.period, one.used - one.leaves, one.sender, one.receiver, TOKENS[one.kind], stage)
        for stage in range(schedule.stages)
        for one in unshards(schedule, stage, clip)
    ]
    return sorted([*found, *gradient_messages(schedule, clip)])


def shared_messages(sharing, step, clip=None):
    """All messages that a step makes necessary, in order of ticks (which are counted from step 0)."""
    found = []
    for stage in range(sharing.schedule.stages):
        found += _between_stages(sharing, step, stage)
        found += _sum(sharing, step, stage)
        found += _weights(sharing, step, stage)
    needs_norm = clip is not None and clip.needs_all_stages
    return sorted([*found, *(_norms(sharing, step) if needs_norm else ())])


def _between_stages(sharing, step, stage):
    """What the devices of a stage send to other stages."""
    for micro_batch in range(sharing.schedule.micro_batches):
        here = step, micro_batch, stage
        if stage + 1 < sharing.schedule.stages:
            above = step, micro_batch, stage + 1
            sent, used = sharing.start("F", here), sharing.start("F", above)
            yield Message(sent, used - sent, sharing.rank_of(here), sharing.rank_of(above), "activation", stage)
        if stage:
            below = step, micro_batch, stage - 1
            sent, used = sharing.start("B", here), sharing.start("B", below)
            yield Message(
                sent, used - sent, sharing.rank_of(here), sharing.rank_of(below), "activation gradient", stage
            )


def _sum(sharing, step, stage):
    """From device to device in micro-batch order, and to the owner."""
    places = [(step, micro_batch, stage) for micro_batch in range(sharing.schedule.micro_batches)]
    for here, after in pairwise(places):
        if sharing.rank_of(here) != sharing.rank_of(after):
            sent, used = sharing.start("B", here), sharing.start("B", after)
            yield Message(sent, used - sent, sharing.rank_of(here), sharing.rank_of(after), "partial gradient", stage)
    last, owner = sharing.last(step, stage), sharing.owner(stage)
    if last != owner:
        yield Message(sharing.complete(step, stage), 1, last, owner, "gradient", stage)


def _weights(sharing, step, stage):
    """Of the version that the step makes."""
    read = sharing.readers(step + 1, stage)
    path = sharing.weight_path(step + 1, stage)
    for sender, receiver in pairwise(path):
        sent = sharing.complete(step, stage) + 1 if sender == path[0] else read[sender]
        yield Message(sent, read[receiver] - sent, sender, receiver, "weights", stage)


def _norms(sharing, step):
    known = sharing.complete(step, 0) + 1
    for lower, upper in pairwise(range(sharing.schedule.stages)):
        sent = sharing.complete(step, upper) + 1
        owners = sharing.owner(lower), sharing.owner(upper)
        yield Message(sent, known - lower - sent, owners[1], owners[0], "norm", upper)
        yield Message(known, 0, *owners, "norm", lower)
