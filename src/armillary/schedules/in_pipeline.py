"""What all pipelines have in common: stages that stay with a process; only tables, and what they bring, differ.

With fewer stages than processes several pipelines work side by side, each on data of its own (data x stage).
"""

from collections.abc import Callable, Mapping

from armillary.schedules.costs import Planned
from armillary.schedules.method import Method, Objective, Objectives, OptionRules, Options, Placing, ScheduleOptions
from armillary.schedules.schedule import Schedule

__all__ = ["PIPELINE_OPTIONS", "pipeline_method", "utilisation"]

PIPELINE_OPTIONS = frozenset({"micro_batches", "stages", "points", "recompute", "clip_norm", "clip_by"})


def pipeline_method(
    table: Callable[[ScheduleOptions], Schedule],
    notes: Callable[[Planned], list[str]],
    knows: frozenset[str] = PIPELINE_OPTIONS,
    examples: tuple[Options, ...] = ({"workers": 3, "micro_batches": 4},),
    parts: int = 1,
    objectives: Callable[[ScheduleOptions], Mapping[int, Objective]] = lambda options: {},
) -> Method:
    """A pipeline's registry entry; arguments as in `Method` and what that is made of. parts: stages a process."""
    return Method(
        table=table,
        options=OptionRules(
            knows=knows,
            implied=lambda given, workers: {"stages": parts * _across(given, workers, parts)},
            defaults=lambda given, workers: {"micro_batches": _across(given, workers, parts)},
        ),
        examples=examples,
        placement=Placing(parts=parts),
        objectives=Objectives(of=objectives),
        notes=notes,
    )


def _across(given: Options, workers: int, parts: int) -> int:
    """Processes of a replica: all, or fewer where fewer stages are asked for; then several replicas work side by side.

    Raises:
        ValueError: several replicas with corrections.
    """
    stages: int = given.get("stages", parts * workers)
    across, rest = divmod(stages, parts)
    if rest or across < 1 or workers % across:
        return workers
    if across < workers and given.get("corrections"):
        raise ValueError(
            f"schedule: {workers // across} replicas of {across} processes know no corrections, for which their "
            f"reference has no words; drop them, or take as many stages as processes"
        )
    return across


def utilisation(planned: Planned) -> tuple[float, float]:
    """Shares of the devices' time: as this cut balances stages; of a flush pipeline with it, whose bubble joins."""
    count, cut = planned.options.micro_batches, planned.options.stages
    flops = [stage.flops for stage in planned.stages]
    balance = sum(flops) / (cut * max(flops)) if max(flops) else 1.0
    return balance, balance * count / (count + cut - 1)
