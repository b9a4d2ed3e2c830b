"""Sides train by turns inside one job: a clock runs for one of them, while the others wait at the next barrier."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from benchmarks.netlab import counted_bytes
from benchmarks.parallax.race import Goal, Turn
from benchmarks.parallax.sides import Side

__all__ = ["by_turns", "rotated", "timed"]

Name = TypeVar("Name")
Metrics = Mapping[str, float]


def by_turns(
    sides: Mapping[str, Side], goal: Goal, turns: int, steps: int, judge: Callable[[int], Mapping[str, Metrics]]
) -> dict[str, tuple[Turn, ...]]:
    """At most so many turns of so many steps for every side, until all have met the goal. All ranks get the same.

    Args:
        judge: number of the turn -> what held-out data say of each side; is called when all had this turn.
    """
    curves: dict[str, tuple[Turn, ...]] = dict.fromkeys(sides, ())
    met: set[str] = set()
    for index in range(turns):
        raced = {name: timed(sides[name], steps) for name in rotated(list(sides), index)}
        for name, metrics in judge(index).items():
            curves[name] += (replace(raced[name], metrics=metrics),)
            met |= {name} if goal.is_met(metrics[goal.metric]) else set()
        if dist.get_rank() == 0:
            print(f"step {(index + 1) * steps}, {goal.metric}: {'; '.join(_said(curves, goal))}", flush=True)
        if met == set(sides):
            break
    return curves


def rotated(names: Sequence[Name], by: int) -> list[Name]:
    """Another one first each time, so that none always follows the same."""
    first = by % len(names)
    return [*names[first:], *names[:first]]


def timed(side: Side, steps: int) -> Turn:
    """A turn of which nothing was evaluated yet; the same on every rank."""
    dist.barrier()
    counted, began = counted_bytes().sent_bytes, time.perf_counter()
    losses = tuple(side.step() for _ in range(steps))
    dist.barrier()
    mine = time.perf_counter() - began, counted_bytes().sent_bytes - counted, losses
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    seconds, sent_bytes, of_all = zip(*everyones, strict=True)
    return Turn(max(seconds), sum(sent_bytes) / len(sent_bytes), of_all, {})


def _said(curves: Mapping[str, tuple[Turn, ...]], goal: Goal) -> list[str]:
    return [
        f"{name} {sum(turn.seconds for turn in curve):.1f} s, {curve[-1].metrics[goal.metric]:.4g}"
        for name, curve in curves.items()
    ]
