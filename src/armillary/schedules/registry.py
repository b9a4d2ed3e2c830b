"""The schedules there are, by name, and a plan's schedule with nothing left open."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.registry import Choice, Registry
from armillary.schedules.edges import Edge
from armillary.schedules.method import PARAMETER_SERVER, USER_LOOP, Method, ScheduleOptions

__all__ = ["SCHEDULES", "has_clock", "options_of", "owns_loop", "read", "tables_stay_whole", "why_not_carried"]

SCHEDULES: Registry[Method] = Registry("schedule", "armillary.schedules")

RECOMPUTE = "recompute"


def owns_loop(choice: Choice) -> bool:
    """Whether training steps are taken by `run.step` under it.

    Raises:
        ValueError: no such schedule.
    """
    return SCHEDULES[choice.name].owns_loop


def has_clock(choice: Choice) -> bool:
    """Whether ranks take their steps together under it, so that it is recorded how long a message is under way.

    Raises:
        ValueError: no such schedule.
    """
    return SCHEDULES[choice.name].step_mode != PARAMETER_SERVER


def why_not_carried(choice: Choice) -> str:
    """What speaks against a schedule that leaves the loop to the user: there is nothing that would carry it out, but
    for the one that says nothing of the order. Empty of others."""
    if choice.name == SIMULTANEOUS.name or owns_loop(choice):
        return ""
    return (
        f"schedule {choice} leaves the loop to the user (step_mode={USER_LOOP!r}), so nobody would carry its table "
        "out; let its Method name another driver, or write what crosses in such a loop as an exchange"
    )


def tables_stay_whole(choice: Choice, tables: Sequence[str]) -> str:
    """Why tables are not kept by row under a schedule that owns the loop, with the remedy."""
    method = SCHEDULES[choice.name]
    is_accumulated = method.replicates_table and "micro_batches" in method.options.knows
    accumulates = ", which accumulates under run.no_sync" if is_accumulated else ""
    return (
        f"schedule {choice.name} keeps tables whole, so {', '.join(tables)} cannot go by row: plan again without that "
        f"constraint, or without a schedule, where tables go by row in a loop of your own{accumulates}"
    )


def read(choice: Choice, workers: int) -> ScheduleOptions:
    """What is not said follows from the schedule and the number of processes; lists become tuples, as JSON has none.

    Raises:
        ValueError: no such schedule, an unknown option, or numbers that do not go together.
    """
    method = SCHEDULES[choice.name]
    rules = method.options
    if strange := sorted(set(choice.options) - rules.knows):
        known = ", ".join(sorted(rules.knows)) or "no options"
        raise ValueError(f"schedule: {choice.name} has no {', '.join(strange)}; it may have {known}")
    given: dict[str, Any] = {key: _frozen(value) for key, value in choice.options.items()}
    if "points" in given:
        given["points"] = tuple(map(_path, given["points"]))
    implied = rules.implied(given, workers)
    for name, value in implied.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"schedule: {choice.name} on {workers} processes has {name}={value}, got {given[name]}; drop {name}, "
                f"or take another number of processes"
            )
    stages = len(given.get("costs", ())) or len(given.get("points", ())) + 1
    filled = {**rules.defaults(given, workers), **implied, **given}
    if filled.get("clip_norm") is not None:
        filled.setdefault("clip_by", "global")
    if method.is_cut:
        filled.setdefault("stages", stages if stages > 1 else filled.get("micro_batches", 1))
    return ScheduleOptions(choice.name, method, **filled)


def options_of(plan: Plan) -> ScheduleOptions:
    """A plan's schedule; where it is cut and which stages are recomputed stand in the plan's stage table.

    Raises:
        ValueError: options that do not go together, or that contradict the stage table.
    """
    choice, stages = plan.schedule, plan.stages
    by_row = [name for group in plan.groups if group.layout == "row_sharded" for name in group.parameters]
    if by_row and owns_loop(choice) and not SCHEDULES[choice.name].placement.deals_rows:
        raise ValueError(f"plan: {tables_stay_whole(choice, by_row)}")
    if not stages:
        return _on_mesh(plan, read(choice, plan.workers))
    said: dict[str, Any] = {"stages": len(stages)}
    if points := [stage.begins for stage in stages[1:]]:
        said["points"] = points
    if again := [number for number, stage in enumerate(stages) if stage.residency.name == RECOMPUTE]:
        said["recompute"] = again
    for name, value in said.items():
        if _frozen(found := choice.options.get(name, value)) != _frozen(value):
            raise ValueError(f"plan: schedule {choice} has {name}={found}, the stage table says {value}; drop {name}")
    options = read(Choice(choice.name, {**choice.options, **said}), plan.workers)
    return _on_mesh(plan, replace(options, edges=_edges(plan)))


def _edges(plan: Plan) -> tuple[Edge, ...]:
    edges = tuple(Edge(stage.edge, stage.edge_back) for stage in plan.stages)
    return edges if any(edge != Edge() for edge in edges) else ()


def _on_mesh(plan: Plan, options: ScheduleOptions) -> ScheduleOptions:
    if (wanted := options.mesh(plan.workers)) != plan.mesh:
        raise ValueError(
            f"plan: schedule {plan.schedule} with {options.stages} stages lies on a mesh {wanted}, the plan's is "
            f"{plan.mesh}; plan again"
        )
    return options


def _path(point: Any) -> str:
    """Of a module; a chain's modules are numbers, which are typed without quotes.

    Raises:
        ValueError: no path, such as 1.10 without quotes, which reads as 1.1.
    """
    if not isinstance(point, str | int):
        raise ValueError(
            f"schedule: points are paths of modules, got {point!r}; put it in quotes, as in points=['1.10']"
        )
    return str(point)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
