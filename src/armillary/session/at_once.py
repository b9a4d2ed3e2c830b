"""Times a model's stages on all ranks at once, because ranks that share cores share them in training too.

A rank alone on a machine finds all of its cores and caches idle. Every rank steps on a batch of its own; all begin
together and take steps on end, in rounds so long that ranks that are more than cores are seen to take turns. The middle
half of the rounds counts: what else the machine did in some of them is no part of a step.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from armillary.facts.profile import Profile
from armillary.runtime.profiling.probe import Loss, StageTimes, timed_step
from armillary.runtime.profiling.stage_paths import OUTSIDE
from armillary.runtime.profiling.untouched import untouched
from armillary.runtime.transport import Transport

__all__ = ["timed_at_once"]

ROUND_SECONDS = 0.01  # a few slices of a scheduler
ENOUGH_SECONDS, FEWEST_ROUNDS, ENOUGH_STEPS = 1.0, 6, 32


def timed_at_once(
    found: Profile, model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport
) -> Profile:
    """The profile with the stage times of this job: means over steps, of the rank that took longest. Every rank
    must call it; all get the same profile, and the model stays as it was.

    Args:
        found: of this model. draw: gives a batch of this rank.

    Raises:
        ValueError: a rank drew no batch or its step failed; on every rank.
    """
    batch: Any = None

    def step() -> StageTimes:
        return _timed(found, model, batch, loss)

    def warm_up() -> StageTimes:
        nonlocal batch
        batch = draw()
        return step()

    times, trouble = _tried(warm_up)
    transport.barrier()
    if not trouble:
        times, trouble = _tried(lambda: _middle(_rounds(step)))
    everyones = transport.share((trouble, times))
    if failed := [f"rank {rank}: {said}" for rank, (said, _) in enumerate(everyones) if said]:
        raise ValueError(f"profile: a step failed on {failed[0]}")
    slowest = max((times for _, times in everyones), key=_total)
    stages = []
    for stage in found.stages:
        forward, backward = slowest[stage.name]
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    return replace(found, stages=tuple(stages))


def _tried(work: Callable[[], StageTimes]) -> tuple[StageTimes, str]:
    """What came of it, and what went wrong: a rank that fails must not leave the others waiting for it."""
    try:
        return work(), ""
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"


def _rounds(step: Callable[[], StageTimes]) -> list[StageTimes]:
    """Of each round its mean step. There are enough when they took a second, or are many steps of a small model."""
    found = list[StageTimes]()
    steps, seconds = 0, 0.0
    while len(found) < FEWEST_ROUNDS or (seconds < ENOUGH_SECONDS and steps < ENOUGH_STEPS):
        taken, end = list[StageTimes](), seconds + ROUND_SECONDS
        while seconds < end:
            taken.append(step())
            seconds += _total(taken[-1])
        steps += len(taken)
        found.append(_mean(taken))
    return found


def _middle(rounds: list[StageTimes]) -> StageTimes:
    """The mean of those that are neither among the shortest quarter nor the longest."""
    aside = len(rounds) // 4
    return _mean(sorted(rounds, key=_total)[aside : len(rounds) - aside])


def _mean(times: list[StageTimes]) -> StageTimes:
    return {stage: (fmean(one[stage][0] for one in times), fmean(one[stage][1] for one in times)) for stage in times[0]}


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
