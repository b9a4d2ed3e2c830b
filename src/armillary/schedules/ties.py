"""Whether two stages may share a parameter: each keeps a copy, and the gradients of both are summed before a step.

The first stage that reads the parameter owns it. Copies stay alike only where both see the same step: weights of one
age, one gradient, one factor to clip by. Where that does not hold, the reason is said here, for planner and runtime.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from armillary.plans.registry import Choice
from armillary.schedules.method import Method, ScheduleOptions
from armillary.schedules.rank_list import Ties
from armillary.schedules.registry import SCHEDULES, read
from armillary.schedules.schedule import Schedule

__all__ = ["ParameterUse", "complaint", "refuse_chains"]


class ParameterUse(NamedTuple):
    """A parameter in one of the stages that hold it. name: by which the stage reads it."""

    stage: int
    name: str


def complaint(options: ScheduleOptions, workers: int, first: ParameterUse, second: ParameterUse) -> str:
    """Why these two may not share a parameter; empty where they may."""
    why = _why(options, workers)
    if not why and first.name == second.name:
        why = "both stages call the same module, and gradients are summed only where each has a module of its own"
    if not why:
        return ""
    remedy = "Cut so that both are in one stage (points=[...]), or untie them"
    if not _sums_ties(options):
        able = [name for name, method in SCHEDULES.all().items() if method.examples and _may_sum(name, method)]
        remedy = f"{remedy}, or take schedule {' or '.join(able)}, which sum their gradients"
    elif options.replicas(workers) > 1:
        remedy = f"{remedy}, or cut into as many stages as there are ranks ({workers})"
    return (
        f"schedule: {first.name} of stage {first.stage} and {second.name} of stage {second.stage} are one parameter; "
        f"{why}. {remedy}"
    )


def _sums_ties(options: ScheduleOptions) -> bool:
    """An exact pipeline of one stage a process does."""
    schedule = options.schedule()
    return options.method.placement.parts == 1 and not schedule.stale_share and not schedule.uncoupled


def _may_sum(name: str, method: Method) -> bool:
    example = dict(method.examples[0])
    workers = example.pop("workers")
    return _sums_ties(read(Choice(name, example), workers))


def _why(options: ScheduleOptions, workers: int) -> str:
    schedule, name = options.schedule(), options.name
    if not _sums_ties(options):
        return _why_not_by(schedule, name)
    if options.replicas(workers) > 1:
        return (
            f"with {options.replicas(workers)} replicas of the stages (data x stage) the gradients of its copies are "
            "not summed"
        )
    if options.clip is not None and not options.clip.waits:
        return f"clip_by={options.clip.by} would clip its two copies by different norms; clip_by='global' would not"
    return ""


def _why_not_by(schedule: Schedule, name: str) -> str:
    if schedule.uncoupled:
        return f"under {name} its two uses learn from different losses"
    if any(one != other for ages in schedule.staleness for one, other in pairwise(ages)):
        return f"under {name} its two uses would see weights of different age"
    if schedule.stale_share:
        return f"under {name} weights are old when they are read, and copies are kept alike under exact schedules only"
    return f"{name} does not sum the gradients of its two uses"


def refuse_chains(ties: Mapping[int, set[int]]) -> Ties:
    """
    Args:
        ties: by stage that holds copies, the stages that own them.

    Raises:
        ValueError: a stage holds copies of several others' parameters.
    """
    for stage, owners in ties.items():
        if len(owners) > 1:
            raise ValueError(
                f"schedule: stage {stage} shares parameters with stages {', '.join(map(str, sorted(owners)))}; want "
                "all of them with one. Cut elsewhere (points=[...])"
            )
    return {stage: owner for stage, (owner,) in ties.items()}
