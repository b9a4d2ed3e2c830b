"""Times a model's stages on all ranks at once, because ranks that share cores share them in training too.

A rank alone on a machine finds all of its cores and caches idle. Every rank steps on a batch of its own; all begin
together and take several steps on end, so that ranks that are more than cores are seen to take turns.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from armillary.facts.profile import Profile
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss, StageTimes, timed_step
from armillary.runtime.watch.stage_paths import OUTSIDE
from armillary.runtime.watch.untouched import untouched

__all__ = ["timed_at_once"]

TIMED_STEPS = 6


def timed_at_once(
    found: Profile, model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport
) -> Profile:
    """The profile with the stage times of this job: means over a few steps, of the rank that took longest. Every rank
    must call it; all get the same profile, and the model stays as it was.

    Args:
        found: of this model. draw: gives a batch of this rank.

    Raises:
        ValueError: a rank drew no batch or its step failed; on every rank.
    """
    batch: Any = None

    def warm_up() -> list[StageTimes]:
        nonlocal batch
        batch = draw()
        return [_timed(found, model, batch, loss)]

    _, trouble = _tried(warm_up)
    transport.barrier()
    steps: list[StageTimes] = []
    if not trouble:
        steps, trouble = _tried(lambda: [_timed(found, model, batch, loss) for _ in range(TIMED_STEPS)])
    everyones = transport.share((trouble, steps))
    if failed := [f"rank {rank}: {said}" for rank, (said, _) in enumerate(everyones) if said]:
        raise ValueError(f"profile: a step failed on {failed[0]}")
    slowest = max((times for _, times in everyones), key=lambda times: sum(map(_total, times)))
    stages = []
    for stage in found.stages:
        forward, backward = (sum(step[stage.name][way] for step in slowest) / TIMED_STEPS for way in (0, 1))
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    return replace(found, stages=tuple(stages))


def _tried(work: Callable[[], list[StageTimes]]) -> tuple[list[StageTimes], str]:
    """What came of it, and what went wrong: a rank that fails must not leave the others waiting for it."""
    try:
        return work(), ""
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


def _timed(found: Profile, model: nn.Module, batch: Any, loss: Loss) -> StageTimes:
    parameters = dict(model.named_parameters())
    with untouched(model) as kept, torch.enable_grad():
        for fact in found.parameters:
            if fact.is_rewritten:
                kept.keep(parameters[fact.name])
        paths = [stage.name for stage in found.stages if stage.name != OUTSIDE]
        return timed_step(model, batch, loss, paths, [fact.name for fact in found.parameters if fact.shardable])


def _total(times: StageTimes) -> float:
    return sum(forward + backward for forward, backward in times.values())
