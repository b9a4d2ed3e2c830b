"""What the user wants of a plan, whatever the prices say: honoured, or refused where it is asked.

One request goes through all of planning, so what is asked is written down, and checked, once. The names are those of
the keywords of `plan`, which says what each means. Under a schedule that cuts the model only dense exchanges can be
asked for (`staged_request`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from armillary.exchanges.exchange import DENSE, ROW, build_dense, row_exchanges
from armillary.planning.constraints import names_of, plain, resolve
from armillary.planning.demand import PRICE, Constraint, refuse_other_allowed, refuse_with_rule, written
from armillary.planning.pricing import Case
from armillary.planning.stage_costs import EdgeRequest, EdgeRequests, Ways, departures_of
from armillary.plans.plan import SIMULTANEOUS, Mean
from armillary.plans.registry import Choice
from armillary.schedules.method import Method
from armillary.schedules.registry import SCHEDULES, read, tables_stay_whole

__all__ = ["NO_CONSTRAINTS", "PlanRequest", "StagedRequest", "named", "staged_request"]

NO_CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType({})


@dataclass(frozen=True)
class PlanRequest:
    """
    Raises:
        ValueError: something is asked that is not written so, that there is not, or that does not go together.
    """

    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    lazy: Collection[str] = ()
    mean: Mean = "workers"
    schedule: Choice = SIMULTANEOUS
    prefetch: bool | None = False
    steps_by_run: bool = False
    micro_batches: int | None = None
    allow: Collection[str] = ()
    rule: str = PRICE
    edge: EdgeRequest = None
    edge_back: EdgeRequest = None

    def __post_init__(self) -> None:
        _refuse_misread(self.constraints, self.lazy)
        refuse_other_allowed(self.allow)
        constraints = {pattern: _without_alias(one) for pattern, one in self.constraints.items()}
        object.__setattr__(self, "constraints", constraints)
        object.__setattr__(self, "lazy", tuple(self.lazy))  # read more than once
        object.__setattr__(self, "allow", tuple(self.allow))
        refuse_with_rule(self.rule, {**self.of_steps, "allow": self.allow})
        self.edges.refuse_without_edges(self.schedule, self.method)

    @property
    def edges(self) -> EdgeRequests:
        return EdgeRequests(self.edge, self.edge_back)

    @property
    def method(self) -> Method:
        """The schedule that is asked for."""
        return SCHEDULES[self.schedule.name]

    @property
    def of_steps(self) -> dict[str, bool]:
        """What may be asked of how steps are taken, by name, and whether it is."""
        return {
            f"schedule {self.schedule}": self.schedule != SIMULTANEOUS,
            "steps_by_run": self.steps_by_run,
            "micro_batches": self.micro_batches is not None,
        }


def named(asked: Choice | str) -> Choice:
    """The schedule that is asked for: as a choice or as text, by its name or an alias.

    Raises:
        ValueError: it is neither, or a text that is no choice.
    """
    if isinstance(asked, Choice | str):
        return SCHEDULES.named(asked)
    raise ValueError(
        f"plan: schedule is {asked!r}; want text, as in 'ring(slack=1)', or armillary.Choice('ring', {{'slack': 1}})"
    )


def _without_alias(constraint: Constraint) -> Constraint:
    """As it is written, without an alias of an exchange."""
    one = written(constraint)
    choice = one if isinstance(one, Choice) else Choice(one)
    meant = DENSE.named(ROW.named(choice))
    return one if meant == choice else meant


def _refuse_misread(constraints: object, lazy: object) -> None:
    """What is of another kind than is wanted, which would be taken for something else, or fail far from here.

    Raises:
        ValueError: one is; the message says how it is written.
    """
    if not isinstance(constraints, Mapping):
        raise ValueError(
            f"plan: constraints is {constraints!r}; want a mapping from names to what each shall have, as in "
            "{'emb.weight': 'row_sharded'}"
        )
    if isinstance(lazy, str):
        raise ValueError(f"plan: lazy is the text {lazy!r}, whose letters would be taken for names; write [{lazy!r}]")


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
