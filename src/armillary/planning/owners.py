"""Owners priced anew, once a run knows better than its profile what batches ask for: which tables had better move.

Only who owns the rows is asked: every table keeps its exchange, and everything that is no table with owners stays as it
is. A table moves if another ownership is forecast to take clearly less than the present one, by the same prices that
chose the present one; a small gain is within the error of a forecast and not worth a move back and forth.

Source: Parallax (Kim et al., EuroSys 2019) searches its partitions once, before training. Departure: the question is
asked again, of what was measured while training.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Group, Plan
from armillary.planning.assembly import with_idle_round
from armillary.planning.buckets import default_limits
from armillary.planning.candidates import Candidate, Question, allowed, candidate
from armillary.planning.constraints import allows, coded_beside, resolve
from armillary.planning.demand import Constraint
from armillary.planning.expected import with_expected
from armillary.planning.fitting import needed_bytes
from armillary.planning.prefetch import with_announcements
from armillary.planning.pricing import Case, row_forecast

__all__ = ["MARGIN", "Repriced", "reprice", "still_allowed", "with_owners"]

MARGIN = 0.10
MOVED = "owners moved, see the notes"


@dataclass(frozen=True)
class Repriced:
    """A table with owners. before: as it is. after: what it should be, the same where nothing is clearly better."""

    before: Candidate
    after: Candidate

    @property
    def table(self) -> str:
        return self.before.parameter


def reprice(
    plan: Plan, case: Case, constraints: Mapping[str, Constraint], tables: Collection[str], margin: float = MARGIN
) -> tuple[Repriced, ...]:
    """Every one of `tables` that the plan gives owners, in the plan's order.

    Args:
        case: with the facts as they are now. constraints: as in `plan`; an ownership they forbid is not considered.
        margin: share of its present seconds that a table must be forecast to save to be moved.

    Raises:
        ValueError: the margin is no share, a constraint cannot be honoured, or plan and case are not of one job.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"rebalance: the margin is a share of a table's seconds, 0 <= margin < 1, got {margin}")
    _refuse_other_job(plan, case)
    question = _question(plan, case, constraints)
    found = []
    held = needed_bytes(plan, case)
    for group in _owned(plan):
        fact = case.profile.parameter(group.parameters[0])
        if fact.name not in tables or fact.rows is None:
            continue
        before = candidate(fact, group.own_exchange, question)
        room = case.topology.memory_bytes - held + before.forecast.memory_bytes
        after = _better(before, _ways(fact, before, room, question), margin)
        held += after.forecast.memory_bytes - before.forecast.memory_bytes
        found.append(Repriced(before, after))
    return tuple(found)


def _question(plan: Plan, case: Case, constraints: Mapping[str, Constraint]) -> Question:
    lazy = frozenset(group.parameters[0] for group in plan.groups if group.is_lazy)
    wanted = _wanted(constraints, case)
    return Question(case, wanted, lazy, default_limits(case.topology.backend))


def _wanted(constraints: Mapping[str, Constraint], case: Case) -> dict[str, Constraint]:
    """Of tables that travel by row already."""
    beside = coded_beside(constraints, case.profile.parameters)
    found = resolve(constraints, case.profile, case.topology, case.against)
    return {name: one for name, one in found.items() if name not in beside}


def _owned(plan: Plan) -> list[Group]:
    return [group for group in plan.groups if group.layout == "row_sharded"]


def _ways(fact: ParameterFact, before: Candidate, room: float, question: Question) -> list[Candidate]:
    """Other ownerships under the same exchange that are allowed and take no more memory than there is."""
    largest = max(room, before.forecast.memory_bytes)
    return [
        way
        for way in allowed(fact, question)
        if way.choice.name == before.choice.name
        and way.departures == before.departures
        and way.forecast.memory_bytes <= largest
    ]


def _better(before: Candidate, ways: list[Candidate], margin: float) -> Candidate:
    best = min(ways, key=lambda way: way.forecast.seconds, default=before)
    return best if best.forecast.seconds < (1 - margin) * before.forecast.seconds else before


def _refuse_other_job(plan: Plan, case: Case) -> None:
    profile, topology = case.profile, case.topology
    wanted = (plan.workers, plan.workers_per_node)
    for noun, found in (
        ("profile", (profile.workers, profile.workers_per_node)),
        ("topology", (topology.workers, topology.workers_per_node)),
    ):
        if found != wanted:
            raise ValueError(
                f"rebalance: the {noun} is of {found[0]} workers in nodes of {found[1]}, the plan of {wanted[0]} in "
                f"nodes of {wanted[1]}; give the one that the plan was made from"
            )


def still_allowed(
    plan: Plan, case: Case, constraints: Mapping[str, Constraint], owners: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Of `owners`, those that differ from the plan's and fit it: the same exchange, and none that is forbidden."""
    wanted = _wanted(constraints, case)
    present = {group.parameters[0]: group.own_exchange for group in _owned(plan)}
    return {
        name: choice
        for name, choice in owners.items()
        if name in present
        and choice.name == present[name].name
        and choice != present[name]
        and allows(wanted.get(name), choice)
    }


def with_owners(plan: Plan, case: Case, owners: Mapping[str, Choice], notes: Sequence[str]) -> Plan:
    """The same plan with other owners for some tables. Of every table with owners the forecast is made anew, from the
    case's facts; the rest of the plan stays.

    Args:
        owners: by table. notes: why.
    """
    groups = [_dealt(group, case, owners) for group in plan.groups]
    priced = with_announcements(with_idle_round(groups, case.topology), case)
    return with_expected(replace(plan, groups=priced, notes=(*plan.notes, *notes)), case)


def _dealt(group: Group, case: Case, owners: Mapping[str, Choice]) -> Group:
    name = group.parameters[0]
    fact = case.profile.parameter(name)
    if group.layout != "row_sharded" or fact.rows is None:
        return group
    choice, reason = owners.get(name, group.own_exchange), MOVED if name in owners else group.reason
    return replace(group, exchange=choice, forecast=row_forecast(fact, choice, group.is_lazy, case), reason=reason)
