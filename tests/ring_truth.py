"""What the tests of rings have in common: the reference's run, late workers, and a loop in which collectives raise."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.plans import Message, Send
from armillary.reference.versions import Reference
from armillary.schedules import Clip, Schedule
from armillary.schedules.routes import refuse_in_ring
from armillary.stages.interpreter import Interpreter
from staged_models import OPTIMIZERS, data, drop, squared_error, stages_of, weights

STEPS, DROP = 5, 2
COLLECTIVES = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce", "all_to_all_single", "reduce_scatter")


def truth(
    schedule: Schedule,
    optimizer: str = "momentum",
    dtype: torch.dtype = torch.float64,
    drains: Sequence[int] = (),
    clip: Clip | None = None,
    autocast: str | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[tuple[Tensor, ...]], list[list[dict[str, Tensor]]]]:
    """Weights at the end, and the losses [step][worker] and buffers per worker of one process."""
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    copies = range(schedule.workers)
    reference = Reference(stages, made, schedule, squared_error, copies=copies, clip=clip)
    scheduler, losses = drop(made, DROP), []
    for step, batches in enumerate(data(STEPS, schedule.workers, dtype)):
        if step in drains:
            reference.drain()
        with bfloat16(autocast is not None):
            losses.append(reference.step(batches))
        scheduler.step()
    return weights(stages), losses, reference.buffers


def bfloat16(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def trained(
    run: Interpreter,
    optimizer: torch.optim.Optimizer,
    rank: int,
    dtype: torch.dtype,
    drains: Sequence[int],
    settles: Sequence[int],
    autocast: str | None,
) -> list[Tensor]:
    """The losses of a worker of a ring that takes its part of the same steps."""
    scheduler, finished = drop(optimizer, DROP), []
    for step, batches in enumerate(data(STEPS, run.schedule.workers, dtype)):
        if step in drains:
            finished += run.drain()
        if step in settles:
            finished += run.settle()
        with bfloat16(autocast is not None):
            finished += run.step([batches[rank]])
        with bfloat16(autocast == "everything"):
            scheduler.step()
    finished += run.drain()
    return [loss for one in finished for loss in one.losses]


@contextmanager
def without_collectives() -> Iterator[None]:
    """Inside, a collective raises."""
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, _refuse)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def _refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("a collective was called inside the training loop")


def has_time(schedule: Schedule) -> bool:
    """Whether a ring of this schedule can clip by the norm over all stages."""
    try:
        refuse_in_ring(schedule, Clip(1.0))
    except ValueError:
        return False
    return True


def short(schedule: Schedule) -> str:
    """A name for a test's case."""
    return f"N{schedule.workers}-K{schedule.stages}-stale{schedule.stale_share:.2f}"


class Late:
    """A channel whose process dawdles before every send, by its own dice."""

    def __init__(self, channel: Any, rank: int) -> None:
        self.channel, self.dice = channel, random.Random(rank)

    def post(self, message: Message) -> Any:
        if isinstance(message, Send):
            time.sleep(self.dice.random() * 0.001)
        return self.channel.post(message)
