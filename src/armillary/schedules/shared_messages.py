"""Who sends what to whom when devices of a stage are shared: messages of one step, which devices change with it.

Between stages: activations up, their gradients down, from the device of a micro-batch to its device of the next stage.
Within a stage: the sum of gradients in micro-batch order, at last to the owner if it is not finished there, and the new
weights from the owner through all devices (`Sharing.weight_path`). Where gradients are clipped by a norm over all
stages, one number more goes down the owners and up again, as in a pipeline: `messages.py`, Note [Norms].

Source: Fournier & Oyallon, 2024 (data and model parallelism with shared devices).
"""

from collections.abc import Iterator
from itertools import pairwise

from armillary.schedules.clipping import Clip
from armillary.schedules.messages import Message
from armillary.schedules.shared import Sharing

__all__ = ["shared_messages"]


def shared_messages(sharing: Sharing, step: int, clip: Clip | None = None) -> list[Message]:
    """All messages that a step makes necessary, in order of ticks (which are counted from step 0)."""
    found: list[Message] = []
    for stage in range(sharing.schedule.stages):
        found += _between_stages(sharing, step, stage)
        found += _sum(sharing, step, stage)
        found += _weights(sharing, step, stage)
    needs_norm = clip is not None and clip.needs_all_stages
    return sorted([*found, *(_norms(sharing, step) if needs_norm else ())])


def _between_stages(sharing: Sharing, step: int, stage: int) -> Iterator[Message]:
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


def _sum(sharing: Sharing, step: int, stage: int) -> Iterator[Message]:
    """From device to device in micro-batch order, and to the owner."""
    places = [(step, micro_batch, stage) for micro_batch in range(sharing.schedule.micro_batches)]
    for here, after in pairwise(places):
        if sharing.rank_of(here) != sharing.rank_of(after):
            sent, used = sharing.start("B", here), sharing.start("B", after)
            yield Message(sent, used - sent, sharing.rank_of(here), sharing.rank_of(after), "partial gradient", stage)
    last, owner = sharing.last(step, stage), sharing.owner(stage)
    if last != owner:
        yield Message(sharing.complete(step, stage), 1, last, owner, "gradient", stage)


def _weights(sharing: Sharing, step: int, stage: int) -> Iterator[Message]:
    """Of the version that the step makes."""
    read = sharing.readers(step + 1, stage)
    path = sharing.weight_path(step + 1, stage)
    for sender, receiver in pairwise(path):
        sent = sharing.complete(step, stage) + 1 if sender == path[0] else read[sender]
        yield Message(sent, read[receiver] - sent, sender, receiver, "weights", stage)


def _norms(sharing: Sharing, step: int) -> Iterator[Message]:
    known = sharing.complete(step, 0) + 1
    for lower, upper in pairwise(range(sharing.schedule.stages)):
        sent = sharing.complete(step, upper) + 1
        owners = sharing.owner(lower), sharing.owner(upper)
        yield Message(sent, known - lower - sent, owners[1], owners[0], "norm", upper)
        yield Message(known, 0, *owners, "norm", lower)
