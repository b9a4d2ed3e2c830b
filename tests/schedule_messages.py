"""What crosses in a step of a ring, a pipeline and shared stages, by formulas: the truth that lists are held against.

Nothing here reads a list of instructions, nor asks the library for a route: who owns a stage, on what way weights and
sums go, and when an owner steps, is worked out anew from the table of a schedule alone.
"""

from itertools import count, pairwise
from typing import NamedTuple


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


# The routes, from the table. Version v of a stage is what v optimizer steps have made of it; step v begins at tick
# v * period, and a worker of age a reads version v in step v + a. Ticks of one version are counted from its step.


def _tick(schedule, kind, micro_batch, stage):
    """When an action of step 0 begins."""
    return next(
        action.start
        for row in schedule.ticks
        for action in row
        if (action.kind, action.micro_batch, action.stage) == (kind, micro_batch, stage)
    )


def _end(schedule, kind, micro_batch, stage):
    return next(
        action.start + action.ticks
        for row in schedule.ticks
        for action in row
        if (action.kind, action.micro_batch, action.stage) == (kind, micro_batch, stage)
    )


def _read(schedule, kind, worker, stage):
    """When a worker of a ring reads a version, forward or backward."""
    return _tick(schedule, kind, worker, stage) + schedule.staleness[worker][stage] * schedule.period


def _owner(schedule, stage):
    """The first worker of a ring whose forward, one step on, finds all gradients of the stage made; else the last."""
    workers = range(len(schedule.ticks))
    made = max(_end(schedule, "B", worker, stage) for worker in workers)
    ready = [worker for worker in workers if _tick(schedule, "F", worker, stage) + schedule.period >= made]
    return min(ready, default=workers[-1])


def _way_of_weights(schedule, stage):
    """From the owner to the others, as their forwards come."""
    owner = _owner(schedule, stage)
    rest = [worker for worker in range(len(schedule.ticks)) if worker != owner]
    return [owner, *sorted(rest, key=lambda worker: (_read(schedule, "F", worker, stage), worker))]


def _way_of_sum(schedule, stage, clip):
    """Worker by worker. An owner next to last adds the last gradient itself, unless the last worker needs the sum to
    know a norm."""
    workers = list(range(len(schedule.ticks)))
    knows_norm = clip is not None and clip.by != "stage"
    if len(workers) > 1 and _owner(schedule, stage) == workers[-2] and not knows_norm:
        workers.pop()
    return workers


class _Update(NamedTuple):
    """When a version is made: tick, and the same in the step of the owner's action before which it is."""

    tick: int
    start: int


def _update(schedule, stage, clip):
    """Before which of its own actions an owner makes a version: not before its forward, nor before a norm that it waits
    for; in time for the first reader. Where the sum has a hop to the owner, it has five eighths of the time until
    another worker reads the version. But no later than behind the owner's backwards: the stages that it owns are made
    one with each action of the step after."""
    period, last = schedule.period, len(schedule.ticks) - 1
    owner = _owner(schedule, stage)
    reads = {worker: _read(schedule, "F", worker, stage) for worker in range(last + 1)}
    begin = _tick(schedule, "F", owner, stage)
    if clip is not None and clip.by == "global":
        begin = max(begin, _end(schedule, "B", last, 0) - period)
    others = [tick for worker, tick in reads.items() if worker != owner]
    end = begin
    if owner < last and others and min(others) > begin:
        end = begin + (min(others) - begin) * 5 // 8
    owned_before = [one for one in range(stage) if _owner(schedule, one) == owner]
    behind = sorted(action.start for action in schedule.ticks[owner])[len(owned_before)] + period
    if begin <= behind < end:
        end = behind
    youngest = min(ages[stage] for ages in schedule.staleness)
    possible = [
        _Update(action.start + steps * period, action.start)
        for action in schedule.ticks[owner]
        for steps in range(youngest + 1)
        if begin <= action.start + steps * period <= min(reads.values())
    ]
    in_time = [one for one in possible if one.tick <= end]
    return max(in_time) if in_time else min(possible)


def ring_messages(schedule, clip=None):
    """All messages of one step of a ring, in order of ticks."""
    found = []
    for stage in range(schedule.stages):
        way, made = _way_of_weights(schedule, stage), _update(schedule, stage, clip)
        for sender, receiver in pairwise(way):
            is_owner = sender == way[0]
            sent = made.tick if is_owner else _read(schedule, "F", sender, stage)
            tick = made.start if is_owner else _tick(schedule, "F", sender, stage)
            lag = _read(schedule, "F", receiver, stage) - sent
            found.append(Message(tick, lag, sender, receiver, "weights", stage))
    return sorted([*found, *gradient_messages(schedule, clip)])


def gradient_messages(schedule, clip=None):
    """The sums of one step on their way from worker to worker and to their owners, and the norms."""
    last = schedule.workers - 1
    for stage in range(schedule.stages):
        done = [_tick(schedule, "B", worker, stage) for worker in range(schedule.workers)]
        for worker in _way_of_sum(schedule, stage, clip)[:-1]:
            lag = done[worker + 1] - done[worker]
            yield Message(done[worker], lag, worker, worker + 1, "partial gradient", stage)
        goal, made = _owner(schedule, stage), _update(schedule, stage, clip).tick
        if goal != last:
            yield Message(done[last], made + schedule.period - done[last], last, goal, "gradient", stage)
    yield from _ring_norms(schedule, clip)


def _ring_norms(schedule, clip):
    """One to each owner but the last worker, for the first of its stages to be updated; see Note [Norms]."""
    if clip is None or clip.by == "stage":
        return
    sent, last = _tick(schedule, "B", schedule.workers - 1, 0), schedule.workers - 1
    owners = {}
    for stage in range(schedule.stages):
        owners.setdefault(_owner(schedule, stage), []).append((_update(schedule, stage, clip).tick, stage))
    for worker, closings in owners.items():
        if worker != last:
            made, stage = min(closings)
            steps = 1 if clip.by == "global" else 2  # from the step of the norm to the one in which it is used
            yield Message(sent, made + steps * schedule.period - sent, last, worker, "norm", stage)


def pipeline_messages(schedule, clip=None):
    """All messages of one step of a pipeline, in order of ticks."""
    found = []
    workers = _workers_of_stages(schedule)
    for worker, row in enumerate(schedule.ticks):
        for action in row:
            after = action.stage + (1 if action.kind == "F" else -1)
            is_back = action.kind == "B" and after in schedule.uncoupled
            if 0 <= after < schedule.stages and workers[after] != worker and not is_back:
                lag = _tick(schedule, action.kind, action.micro_batch, after) - action.start
                content = "activation" if action.kind == "F" else "activation gradient"
                found.append(Message(action.start, lag, worker, workers[after], content, action.stage))
    needs_norm = clip is not None and clip.by != "stage"
    return sorted([*found, *(_pipeline_norms(schedule, workers) if needs_norm else ())])


def _workers_of_stages(schedule):
    """Each stage has one."""
    found = {(one.stage, worker) for worker, row in enumerate(schedule.ticks) for one in row}
    return [worker for _, worker in sorted(found)]


def _pipeline_norms(schedule, workers):
    """Down the stages behind the last gradient, and up again from worker to worker: with the first micro-batch of a
    later step that enters when every backward is over."""
    last = schedule.micro_batches - 1
    over = max(one.start + one.ticks for row in schedule.ticks for one in row)
    entering = ((step, m) for step in count(1) for m in range(schedule.micro_batches))
    step, m = next(one for one in entering if _tick(schedule, "F", one[1], 0) + one[0] * schedule.period >= over)
    done = [_tick(schedule, "B", last, stage) for stage in range(schedule.stages)]
    goes = [_tick(schedule, "F", m, stage) + step * schedule.period for stage in range(schedule.stages)]
    for lower, upper in pairwise(range(schedule.stages)):
        if workers[lower] != workers[upper]:
            yield Message(done[upper], done[lower] - done[upper], workers[upper], workers[lower], "norm", upper)
    for lower, upper in pairwise(dict.fromkeys(workers)):
        below, above = workers.index(lower), workers.index(upper)
        sent = goes[below] if below else done[0]
        yield Message(sent, goes[above] - sent, lower, upper, "norm", below)


def lent_messages(schedule, clip=None):
    """All messages of one step, in order of ticks. Each version of a stage makes its way twice, for forwards and for
    backwards. It leaves as long before it is read as a mean stage takes both ways; at the earliest when the sender has
    it."""
    hop = max(1, schedule.period // max(len(schedule.ticks), schedule.stages))
    found = []
    for stage in range(schedule.stages):
        way, made = _way_of_weights(schedule, stage), _update(schedule, stage, clip)
        for kind, content in (("F", "forward weights"), ("B", "backward weights")):
            for sender, receiver in pairwise(way):
                has = made.tick if sender == way[0] else _read(schedule, kind, sender, stage)
                read = _read(schedule, kind, receiver, stage)
                leaves = max(has, read - hop)
                found.append(Message(leaves % schedule.period, read - leaves, sender, receiver, content, stage))
    return sorted([*found, *gradient_messages(schedule, clip)])


# Shared stages: stage j of N has N - j devices, which micro-batches take by turns, counted through all steps.


def _device(schedule, step, micro_batch, stage):
    """The devices of stage 0 come first."""
    workers = schedule.micro_batches
    first = sum(workers - before for before in range(stage))
    return first + (step * workers + micro_batch) % (workers - stage)


def _at(schedule, kind, step, micro_batch, stage):
    return _tick(schedule, kind, micro_batch, stage) + step * schedule.period


def _readers(schedule, version, stage):
    """By device, in the order of time: when it first reads a version."""
    found = {}
    steps = range(version, version + 2 + max(map(max, schedule.staleness)))
    places = [(step, m) for step in steps for m in range(schedule.micro_batches)]
    for step, m in sorted(places, key=lambda place: _at(schedule, "F", *place, stage)):
        if step - schedule.staleness[m][stage] == version:
            found.setdefault(_device(schedule, step, m, stage), _at(schedule, "F", step, m, stage))
    return found


def shared_messages(sharing, step, clip=None):
    """All messages that a step makes necessary, in order of ticks (which are counted from step 0)."""
    schedule, found = sharing.schedule, []
    last = schedule.micro_batches - 1
    owners = [_device(schedule, 0, last, stage) for stage in range(schedule.stages)]
    for stage, owner in enumerate(owners):
        found += _between_stages(schedule, step, stage)
        found += _sum(schedule, step, stage, owner)
        found += _weights(schedule, step, stage, owner)
    needs_norm = clip is not None and clip.by != "stage"
    return sorted([*found, *(_norms(schedule, step, owners) if needs_norm else ())])


def _between_stages(schedule, step, stage):
    """What the devices of a stage send to other stages: activations up, their gradients down."""
    ways = (("F", stage + 1, "activation"), ("B", stage - 1, "activation gradient"))
    for micro_batch in range(schedule.micro_batches):
        for kind, other, content in ways:
            if 0 <= other < schedule.stages:
                sent, used = (_at(schedule, kind, step, micro_batch, one) for one in (stage, other))
                devices = (_device(schedule, step, micro_batch, one) for one in (stage, other))
                yield Message(sent, used - sent, *devices, content, stage)


def _sum(schedule, step, stage, owner):
    """From device to device in micro-batch order, and to the owner, a tick later."""
    devices = [_device(schedule, step, m, stage) for m in range(schedule.micro_batches)]
    done = [_at(schedule, "B", step, m, stage) for m in range(schedule.micro_batches)]
    for here, after in pairwise(range(schedule.micro_batches)):
        if devices[here] != devices[after]:
            lag = done[after] - done[here]
            yield Message(done[here], lag, devices[here], devices[after], "partial gradient", stage)
    if devices[-1] != owner:
        yield Message(done[-1], 1, devices[-1], owner, "gradient", stage)


def _weights(schedule, step, stage, owner):
    """Of the version that the step makes, behind the last gradient: from the owner to the others as they read it."""
    read = _readers(schedule, step + 1, stage)
    way = [owner, *(device for device in read if device != owner)]
    made = _at(schedule, "B", step, schedule.micro_batches - 1, stage) + 1
    for sender, receiver in pairwise(way):
        sent = made if sender == owner else read[sender]
        yield Message(sent, read[receiver] - sent, sender, receiver, "weights", stage)


def _norms(schedule, step, owners):
    """Down the owners, each when its stage's last gradient is there, and up again at once when the first one's is."""
    last = schedule.micro_batches - 1
    known = _at(schedule, "B", step, last, 0) + 1
    for lower, upper in pairwise(range(schedule.stages)):
        sent = _at(schedule, "B", step, last, upper) + 1
        yield Message(sent, known - lower - sent, owners[upper], owners[lower], "norm", upper)
        yield Message(known, 0, owners[lower], owners[upper], "norm", lower)
