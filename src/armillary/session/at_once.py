"""Times a model's stages on all ranks at once, because ranks that share cores share them in training too.

A rank alone on a machine finds all of its cores and caches idle. Every rank steps on a batch of its own, in rounds that
all begin together, so long that ranks that are more than cores are seen to take turns. A round has as many steps on
every rank, so that a model with collectives of its own makes as many everywhere: it is as long as the rank
that took longest in it, as every step of training is: two ranks that were held up now and then, by turns, took 302 ms
in the median each, and 321 when the slower one of each step was counted. The middle half of the rounds counts: what
else the machine did in some of them is no part of a step.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn

from armillary.facts.profile import Profile
from armillary.facts.stage_paths import OUTSIDE
from armillary.facts.untouched import untouched
from armillary.runtime.profiling.probe import Loss, StageTimes, timed_step
from armillary.runtime.transport import Transport

__all__ = ["timed_at_once"]

ROUND_SECONDS = 0.01  # a few slices of a scheduler
ENOUGH_SECONDS, FEWEST_ROUNDS, ENOUGH_STEPS = 1.0, 6, 32


def timed_at_once(
    found: Profile, model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport
) -> Profile:
    """The profile with the stage times of this job: means over rounds, each of the rank that took longest in it. Every
    rank must call it; all get the same profile, and the model stays as it was.

    Args:
        found: of this model. draw: gives a batch of this rank.

    Raises:
        ValueError: a rank drew no batch or its step failed; on every rank.
    """
    batch: Any = None

    def step() -> StageTimes:
        return _timed(found, model, batch, loss)

    def warm_up() -> _Round:
        nonlocal batch
        batch = draw()
        step()
        return _Round(step(), 1)

    first = _slowest(warm_up, transport)
    each = max(1, math.ceil(ROUND_SECONDS / max(_total(first.times), 1e-9)))
    times = _middle(_rounds(step, min(each, ENOUGH_STEPS), transport))
    stages = []
    for stage in found.stages:
        forward, backward = times[stage.name]
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    return replace(found, stages=tuple(stages))


class _Round(NamedTuple):
    """Of one rank: its mean step, and how many it took."""

    times: StageTimes
    steps: int


def _slowest(work: Callable[[], _Round], transport: Transport) -> _Round:
    """Collective. A rank that fails must not leave the others waiting for it."""
    mine, trouble = None, ""
    try:
        mine = work()
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    everyones: list[tuple[_Round | None, str]] = transport.share((mine, trouble))
    if failed := [f"rank {rank}: {said}" for rank, (_, said) in enumerate(everyones) if said]:
        raise ValueError(f"profile: a step failed on {failed[0]}")
    return max((one for one, _ in everyones if one is not None), key=lambda one: _total(one.times))


def _rounds(step: Callable[[], StageTimes], each: int, transport: Transport) -> list[StageTimes]:
    """Of each round of so many steps the mean step of the slowest rank. There are enough when they took a second, or
    are many steps of a small model."""

    def play() -> _Round:
        return _Round(_mean([step() for _ in range(each)]), each)

    found = list[StageTimes]()
    steps, seconds = 0, 0.0
    while len(found) < FEWEST_ROUNDS or (seconds < ENOUGH_SECONDS and steps < ENOUGH_STEPS):
        slowest = _slowest(play, transport)
        found.append(slowest.times)
        steps += slowest.steps
        seconds += slowest.steps * _total(slowest.times)
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
