"""Who sends what to whom in a ring whose workers keep no weights but those they use, and what each of them holds.

Homes, sums and norms are the ring's (`schedules/messages.py`). Weights travel twice a step: one token of a stage serves
the forwards, one the backwards, each from the home through the workers in the order in which they use it, sent on with
that use and dropped once it has arrived. A home sends as late as leaves a hop its time, for until then its master
weights are the token; the last worker of a path sends nothing on. When the home steps while a version older than its
newest is still to be read or sent there, it keeps a copy of that version so long.

Note [A hop's time]. A receive is posted, and its room taken, one hop's time before the use: as long as a mean stage
takes both ways, and never more than the uniform delay. So a token is held twice for a hop's time only.

Note [Crossing]. A token may be sent in one step and used in the next. Before the first step, and after a drain, such a
token was never sent or carries what nobody reads any more; there the home sends to that receiver directly. Its sender
does not wait for it before its own next step: workers may do what they like between two steps, meet for example.

Source: Fournier & Oyallon, 2024 (ZeRO mode); WeiPipe (2025) for two tokens. Departures: the home is the first worker
that can read new weights, which saves a hop and spreads states evenly; slack.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from armillary.schedules.action import Kind
from armillary.schedules.clipping import Clip
from armillary.schedules.messages import (
    Content,
    Message,
    closing,
    gradient_messages,
    home,
    lead,
    use,
    used_at,
    weight_path,
)
from armillary.schedules.schedule import Schedule

__all__ = [
    "TOKENS", "Moment", "crossing", "departures", "early", "held_copies", "hop_ticks", "kept_until", "mean_copies",
    "zero_messages",
]  # fmt: skip

TOKENS: dict[Content, Kind] = {"forward weights": "F", "backward weights": "B"}


class Moment(NamedTuple):
    """Before an action of a worker, some steps after another moment's; sorts in the order of that worker's time."""

    steps: int
    action: int


def hop_ticks(schedule: Schedule) -> int:
    """See Note [A hop's time]."""
    return max(1, schedule.period // max(schedule.workers, schedule.stages))


def zero_messages(schedule: Schedule, clip: Clip | None = None) -> list[Message]:
    """All messages of one step, in order of ticks.

    Raises:
        ValueError: weights more than one step old, or workers that form no ring.
    """
    if max(map(max, schedule.staleness)) > 1:
        raise ValueError(
            f"schedule: {schedule.name} reads weights more than one step old; its messages want at most one"
        )
    tokens = [token for stage in range(schedule.stages) for token in _tokens(schedule, stage, clip)]
    return sorted([*tokens, *gradient_messages(schedule, clip)])


def _tokens(schedule: Schedule, stage: int, clip: Clip | None) -> list[Message]:
    """The messages of one stage's weights."""
    found = []
    path = weight_path(schedule, stage)
    for content, kind in TOKENS.items():
        for sender, receiver in pairwise(path):
            used, sent = use(schedule, receiver, stage, kind), use(schedule, sender, stage, kind)
            tick = schedule.action(kind, sender, stage).start
            if sender == path[0]:
                steps, tick = _leaves_home(schedule, stage, (used, receiver), clip)
                sent = tick + steps * schedule.period
            found.append(Message(tick, used - sent, sender, receiver, content, stage))
    return found


def _leaves_home(schedule: Schedule, stage: int, first: tuple[int, int], clip: Clip | None) -> tuple[int, int]:
    """(steps after the one in which the version was made, tick in that step) of a home's sending to `first` user.

    first: when it uses the token, counted in the home's step in which the version is made, and who it is.
    """
    used, receiver = first
    owner, made = home(schedule, stage), closing(schedule, stage, clip).tick
    fitting = [
        (steps, action.start)
        for steps in range(schedule.staleness[receiver][stage] + 1)
        for action in schedule.ticks[owner]
        if made <= action.start + steps * schedule.period <= used
    ]
    in_time = [(steps, tick) for steps, tick in fitting if tick + steps * schedule.period <= used - hop_ticks(schedule)]
    return max(in_time, default=min(fitting))


def crossing(schedule: Schedule, message: Message) -> int:
    """In how many steps of the receiver after the sender's a token is used: 0 or 1; see Note [Crossing]."""
    used = schedule.action(TOKENS[message.content], message.receiver, message.stage).start
    return (message.tick + message.lag - used) // schedule.period


def early(schedule: Schedule, message: Message, clip: Clip | None = None) -> int:
    """How many actions before its use a message's receive is posted: a hop's time.

    What is sent in the receiver's own step at the earliest may never be sent before that begins.
    """
    ahead = lead(schedule, message, hop_ticks(schedule))
    is_certain = message.content in ("gradient", "norm") or (message.content in TOKENS and crossing(schedule, message))
    return ahead if is_certain else min(ahead, used_at(schedule, message, clip))


def departures(schedule: Schedule, stage: int, clip: Clip | None = None) -> list[tuple[Moment, Message]]:
    """When a version leaves its home, counted from the step in which it is made."""
    owner = home(schedule, stage)
    starts = [action.start for action in schedule.ticks[owner]]
    return [
        (Moment(schedule.staleness[m.receiver][stage] - crossing(schedule, m), starts.index(m.tick)), m)
        for m in _tokens(schedule, stage, clip)
        if m.sender == owner
    ]


def kept_until(schedule: Schedule, stage: int, clip: Clip | None = None) -> Moment:
    """When a version is last read or sent at its home, counted from the step in which it is made."""
    age = schedule.staleness[home(schedule, stage)][stage]
    sent = [moment for moment, _ in departures(schedule, stage, clip)]
    return max([*sent, Moment(age, 2 * schedule.stages - 1 - stage)])


def held_copies(schedule: Schedule, worker: int, clip: Clip | None = None) -> list[Counter[int]]:
    """Copies of each stage's weights that a worker holds during each of its 2K actions of a step, in the steady state.

    Master weights, tokens from the posting of their receive until they are used and have been sent on, and copies of
    versions that a home has stepped beyond.
    """
    count = 2 * schedule.stages
    found = [Counter[int]() for _ in range(count)]
    for stage in range(schedule.stages):
        spans = _spans(schedule, worker, stage, clip)
        if home(schedule, stage) == worker:
            spans = [(0, count - 1), *_spans_at_home(schedule, stage, clip)]
        for first, last in spans:
            for action in range(first, last + 1):
                found[action % count][stage] += 1
    return found


def mean_copies(schedule: Schedule, stage: int, clip: Clip | None = None) -> float:
    """Copies of a stage's weights and gradients a worker holds beside master weights, over workers and actions.

    A gradient counts from the posting of its receive, or where it is summed first, until it has been sent, or is used.
    """
    count, total = 2 * schedule.stages, 0
    for worker in range(schedule.workers):
        is_home = home(schedule, stage) == worker
        held = _spans_at_home(schedule, stage, clip) if is_home else _spans(schedule, worker, stage, clip)
        total += sum(last + 1 - first for first, last in held)
    for message in gradient_messages(schedule, clip):
        if message.stage == stage and message.content != "norm":
            total += early(schedule, message, clip) + _begun(schedule, message)
    return total / (count * schedule.workers)


def _spans(schedule: Schedule, worker: int, stage: int, clip: Clip | None) -> list[tuple[int, int]]:
    """Of a worker that is not the home: first and last action, numbered on over the steps, of each token of a stage."""
    tokens = _tokens(schedule, stage, clip)
    comes = {message.content: message for message in tokens if message.receiver == worker}
    goes = {message.content: message for message in tokens if message.sender == worker}
    found = []
    for content, message in comes.items():
        used = used_at(schedule, message)
        sent_on = _begun(schedule, goes[content]) if content in goes else 0
        found.append((used - early(schedule, message), used + sent_on))
    return found


def _spans_at_home(schedule: Schedule, stage: int, clip: Clip | None) -> list[tuple[int, int]]:
    """The same of the copies at the home, beside its master weights."""
    count, made = 2 * schedule.stages, closing(schedule, stage, clip)
    until = kept_until(schedule, stage, clip)
    outdated = (1 + made.steps) * count + made.action
    kept, found = until.steps * count + until.action, []
    for moment, message in departures(schedule, stage, clip):
        sent = moment.steps * count + moment.action
        over = sent + _begun(schedule, message)
        if sent < outdated:
            found.append((sent, over))
        else:  # what is sent is the copy that is kept
            kept = max(kept, over)
    return [*found, (outdated, kept)] if kept >= outdated else found


def _begun(schedule: Schedule, message: Message) -> int:
    """Actions that the sender begins after the sending, while it may have to keep it: up to the tick of the use.

    Where that is in the receiver's next step, the sender does not wait for it in its own step.
    """
    used, starts = message.tick + message.lag, [action.start for action in schedule.ticks[message.sender]]
    begun = sum((used - start) // schedule.period - (message.tick - start) // schedule.period for start in starts)
    crosses = used >= schedule.ticks[message.receiver][0].start + schedule.period
    return max(begun, len(starts) - 1 - starts.index(message.tick)) if crosses else begun
