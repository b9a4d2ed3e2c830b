"""What the user demands of parameters under a schedule that cuts the model: dense exchanges.

Honoured or refused with the reason, as `constraints.py` does for a loop of the user's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.planning.constraints import names_of, plain, resolve
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.stage_costs import Ways, departures_of
from armillary.plans.choice import Choice
from armillary.schedules.method import Method
from armillary.schedules.registry import SCHEDULES, read, tables_stay_whole

__all__ = ["StagedRequest", "staged_request"]


class StagedRequest(NamedTuple):
    """schedule: with the number of stages that suits the ways. ways: dense exchanges, by parameter. notes: what the
    plan says of them."""

    schedule: Choice
    ways: Ways
    notes: tuple[str, ...] = ()


def staged_request(case: Case, request: PlanRequest) -> StagedRequest:
    """
    Raises:
        ValueError: a constraint names no parameter, or what the schedule cannot do; or a table is to be lazy.
    """
    schedule, method = request.schedule, SCHEDULES[request.schedule.name]
    ways: dict[str, Choice] = {}
    for name, demanded in resolve(request.constraints, case.profile, case.topology, case.against).items():
        choice = plain(demanded) if isinstance(demanded, str) else demanded
        if choice.name in row_exchanges():
            raise ValueError(f"plan: {name!r} is to be {demanded}, but {tables_stay_whole(schedule, [name])}")
        if reason := _why_not(choice, schedule, method):
            raise ValueError(f"plan: {name!r} is to be {demanded}, but {reason}")
        ways[name] = choice
    if quiet := sorted(names_of(request.lazy, case.profile.parameters)):
        raise ValueError(
            f"plan: {', '.join(quiet)} cannot be lazy, since schedule {schedule.name} keeps tables whole; drop lazy, "
            f"or plan without a schedule"
        )
    inexact = sorted({str(choice) for choice in ways.values() if departures_of(choice)})
    return _with_replicas(StagedRequest(schedule, ways), inexact, case.topology.workers)


def _with_replicas(request: StagedRequest, inexact: Sequence[str], workers: int) -> StagedRequest:
    """Whoever names a way that is not exact wants it used: it acts between ranks that hold the same stage."""
    options = read(request.schedule, workers)
    if not inexact or options.replicas(workers) > 1:
        return request
    named, idle = ", ".join(inexact), "each stage is on one worker, so no gradient travels"
    across = next((ranks for ranks in range(workers // 2, 1, -1) if workers % ranks == 0), 0)
    if not across:
        return request._replace(notes=(f"{idle} and {named} leaves nothing out",))
    fewer, side_by_side = options.stages // workers * across, workers // across
    if {"stages", "points", "costs"} & request.schedule.options.keys():
        note = f"{idle} and {named} leaves nothing out; with stages={fewer} each stage is on {side_by_side} workers"
        return request._replace(notes=(note,))
    note = f"stages={fewer} was taken: so each stage is on {side_by_side} workers, between which {named} acts"
    schedule = Choice(request.schedule.name, {**request.schedule.options, "stages": fewer})
    return request._replace(schedule=schedule, notes=(note,))


def _why_not(choice: Choice, schedule: Choice, method: Method) -> str:
    """Why no whole parameter goes by it under the schedule, with a remedy; empty if it can."""
    if not method.has_exchanges:
        several = ", ".join(name for name, one in SCHEDULES.all().items() if one.has_exchanges)
        return (
            f"schedule {schedule.name} carries gradients from rank to rank itself, so no exchange takes part: drop it, "
            f"or take {several}"
        )
    if not build_dense(choice.name, **choice.options).keeps_replicas_alike:
        return (
            f"under schedule {schedule.name} ranks that hold a stage have one model, and it lets their weights differ "
            "between steps: take it without a schedule, or an exchange that carries gradients in every step"
        )
    return ""
