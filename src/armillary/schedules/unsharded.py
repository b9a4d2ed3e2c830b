"""Who lends whom the weights of a stage, and when, where only its owner keeps them; and what crosses in a step.

Weights travel twice a step: one token of a stage serves the forwards, one the backwards. Each goes from the owner
through the workers in the order in which they use it, and is dropped once it was used and has been sent on. A token
leaves a hop's time before it is needed, or when the sender has it: until then its room is needed once only.

Note [A hop's time]. As long as a mean stage takes both ways, and never more than the uniform delay.

Note [Crossing]. A token may be used in one step and sent on for the next. In the first step, and after a drain, the
worker before on the way has not had it, or had what nobody reads any more: there the owner sends it directly.

Source: Fournier & Oyallon, 2024 (ZeRO mode); WeiPipe (2025) for two tokens. Departures: the owner is the first worker
that can read new weights, which saves a hop and spreads states evenly; slack.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from armillary.schedules.action import Kind
from armillary.schedules.clipping import Clip
from armillary.schedules.messages import Content, Message, closing, gradient_messages, weight_path
from armillary.schedules.schedule import Schedule

__all__ = ["TOKENS", "Token", "Unshard", "hop_ticks", "lent_messages", "unshards"]

Token = Content  # of the keys of TOKENS
TOKENS: dict[Kind, Token] = {"F": "forward weights", "B": "backward weights"}


class Unshard(NamedTuple):
    """One token's way from one worker to the next, in every step.

    leaves, used: ticks, counted in the receiver's step.
    crosses: how many steps of its own before the receiver's the sender used it; of an owner 0.
    """

    leaves: int
    used: int
    kind: Kind
    stage: int
    sender: int
    receiver: int
    crosses: int


def hop_ticks(schedule: Schedule) -> int:
    """See Note [A hop's time]."""
    return max(1, schedule.period // max(schedule.workers, schedule.stages))


def unshards(schedule: Schedule, stage: int, clip: Clip | None = None) -> Iterator[Unshard]:
    """Of one stage.

    Raises:
        ValueError: weights more than one step old, or workers that form no ring.
    """
    if max(map(max, schedule.staleness)) > 1:
        raise ValueError(f"schedule: {schedule.name} reads weights more than one step old; want at most one to lend")
    way, made = weight_path(schedule, stage), closing(schedule, stage, clip).tick
    ages = [schedule.staleness[worker][stage] for worker in range(schedule.workers)]
    for kind in TOKENS:
        starts = {worker: schedule.action(kind, worker, stage).start for worker in way}
        for sender, receiver in pairwise(way):
            crosses = 0 if sender == way[0] else ages[receiver] - ages[sender]
            before = ages[receiver] if sender == way[0] else crosses
            has = (made if sender == way[0] else starts[sender]) - before * schedule.period
            used = starts[receiver]
            yield Unshard(max(has, used - hop_ticks(schedule)), used, kind, stage, sender, receiver, crosses)


def lent_messages(schedule: Schedule, clip: Clip | None = None) -> list[Message]:
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
