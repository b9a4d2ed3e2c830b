"""Why a plan is what it is, and what exchanges that are not exact would bring.

No price says what a departure does to the loss. So a plan stays exact, and a note may say what another way would bring
here, and how to ask for it. Where the user allows a departure, the mildest way among those that are about the quickest
is taken.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from armillary.exchanges.exchange import build_dense, build_row, consensus_of, dense_exchanges, row_exchanges
from armillary.planning.activities import least_seconds
from armillary.planning.candidates import Candidate, Question, allowed, candidates
from armillary.planning.constraints import allows, why_not, why_not_by_row
from armillary.planning.demand import MAY_BE_ALLOWED
from armillary.planning.grouping import dense_group, is_ownerless
from armillary.planning.memory import needed_bytes
from armillary.planning.pricing import Case, dense_forecast, idle_round
from armillary.planning.quicker_ways import OtherWay
from armillary.planning.simulator import simulate
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.units import bytes_text, seconds_text

__all__ = [
    "Verdict",
    "departing",
    "reason",
    "verdicts",
    "with_allowed",
    "with_edges_weighed",
    "with_named_weighed",
    "with_taken",
]


@dataclass(frozen=True)
class Verdict:
    """A candidate and what became of it. lost: why it was not taken, empty for the one that was."""

    candidate: Candidate
    lost: str

    @property
    def is_chosen(self) -> bool:
        return not self.lost


def reason(
    fact: ParameterFact, free: Mapping[str, Candidate], chosen: Mapping[str, Candidate], question: Question
) -> str:
    """One sentence: what decided, and the price of the runner-up.

    Args:
        free, chosen: the cheapest choice before and after everything was made to fit in memory.
    """
    one = chosen[fact.name]
    if fact.name in question.wanted:
        return f"by constraint {question.wanted[fact.name]}{_against(one, question, fact)}"
    if fact.reads == "never":
        return "never read"
    if fact.reads == "dense":
        return "read whole"
    if not fact.shardable:
        return f"not by row: {why_not_by_row(fact)}"
    if question.case.topology.workers == 1:
        return "one worker: nothing crosses"
    said = f"a worker reads {100 * fact.alpha:.2g} % of its rows: {seconds_text(one.forecast.seconds)}"
    if free[fact.name] != one:
        cheaper = free[fact.name]
        return f"{said}; {cheaper.choice}, {seconds_text(cheaper.forecast.seconds)}, does not fit in memory"
    return f"{said}{_against(one, question, fact)}"


def _against(one: Candidate, question: Question, fact: ParameterFact) -> str:
    """The cheapest other exchange that the constraint allows; and why it lost, if by itself it is cheaper."""
    others = [other for other in allowed(fact, question) if other.choice.name != one.choice.name]
    if not others:
        return ""
    other = min(others, key=lambda way: way.forecast.seconds)
    said, round_ = f"; next {other.choice}, {seconds_text(other.forecast.seconds)}", 0.0
    if other.is_row_sharded != one.is_row_sharded:
        round_ = idle_round(question.case.topology).seconds
    saved = one.forecast.seconds - other.forecast.seconds
    if other.is_row_sharded and saved > 0 and round_:
        said += f" and {seconds_text(round_)} for the message that ends lookups"
    saved += round_ if one.is_row_sharded else -round_
    more = other.forecast.memory_bytes - one.forecast.memory_bytes
    return f"{said}, not clearly faster and {bytes_text(more)} more memory" if saved > 0 and more > 0 else said


def verdicts(free: Mapping[str, Candidate], chosen: Mapping[str, Candidate], question: Question) -> tuple[Verdict, ...]:
    """Of every parameter that is read by row, in the model's order, candidates in the order they were listed."""
    return tuple(
        Verdict(way, _lost(way, free[fact.name], chosen[fact.name], question))
        for fact in question.trained
        if fact.reads == "rows"
        for way in candidates(fact, question)
    )


def _lost(way: Candidate, free: Candidate, chosen: Candidate, question: Question) -> str:
    demanded = question.wanted.get(way.parameter)
    if way == chosen:
        return ""
    if not allows(demanded, way.choice):
        return f"constraint: {demanded}"
    slower = way.forecast.seconds - chosen.forecast.seconds
    if slower >= 0 and chosen == free:
        return f"{seconds_text(slower)} slower"
    more = way.forecast.memory_bytes - chosen.forecast.memory_bytes
    if chosen == free and more > 0:
        return f"{seconds_text(-slower)} faster, which is not clear, and {bytes_text(more)} more memory"
    more += way.peak.crossing_bytes - chosen.peak.crossing_bytes
    if more > 0 and chosen != free:
        return f"needs {bytes_text(more)} more, which do not fit"
    if slower >= 0:
        return f"{seconds_text(slower)} slower"
    return f"{seconds_text(-slower)} faster, but takes one message more, which ends lookups"


WORTH_SAYING = 1.15
WORTH_CHANGING = 0.02  # of a step: forecasts do not tell less apart
NOT_TIMED = "; coding is priced by a default here, armillary measure times it"
CODED_ROWS = (
    "rows are rounded or thinned where they travel; what a code leaves out is lost, the owner's row is as it was"
)
CLOSE = 1.05  # times the quickest step: what is milder is worth that much


class _Way(NamedTuple):
    """The plan with its free buckets by an exchange that departs, and its simulated step."""

    choice: Choice
    plan: Plan
    seconds: float

    @property
    def departs(self) -> tuple[str, ...]:
        return dense_exchanges()[self.choice.name].departs


def with_allowed(plan: Plan, question: Question, allow: Collection[str] = ()) -> Plan:
    """The plan, or a milder-or-quicker one of the departures that are allowed; with what is not exact about it."""
    if not allow or question.case.topology.workers == 1:
        return with_taken(plan)
    now = simulate(plan, question.case).step_seconds
    allowed = [
        way
        for way in _ways(plan, question, is_asked=True)
        if set(way.departs) <= set(allow) and _fits(way.plan, question)
    ]
    taken = _mildest(allowed, now)
    if taken is None:
        return with_taken(plan)
    said = f"allowed {', '.join(taken.departs)}: {_steps(taken, now)}"
    return with_taken(replace(taken.plan, notes=(*taken.plan.notes, said)))


def departing(plan: Plan, question: Question) -> Iterator[OtherWay]:
    """Of ways that depart alike and fit, the mildest of those that are about the quickest, where that saves much."""
    ways = [way for way in _ways(plan, question, is_asked=False) if _fits(way.plan, question)]
    now = simulate(plan, question.case).step_seconds if ways else 0.0
    for departs in dict.fromkeys(way.departs for way in ways):
        best = _mildest([way for way in ways if way.departs == departs], now)
        if best is None or now / best.seconds < WORTH_SAYING:
            continue
        ask = f"constraints={{'*': '{best.choice}'}} (--exchange '{best.choice}=*')"
        if set(departs) <= set(MAY_BE_ALLOWED):
            ask = f"allow={departs!r} (--allow {' --allow '.join(departs)})"
        yield OtherWay(str(best.choice), False, now, best.seconds, ask + ("" if _is_timed(question) else NOT_TIMED))


def with_taken(plan: Plan) -> Plan:
    """The plan with what is not exact about its exchanges."""
    return replace(plan, notes=(*plan.notes, *_said_of_taken(plan)))


def with_edges_weighed(plan: Plan, uncoded: Plan) -> Plan:
    """The plan with a note where its codes of edges make no step shorter.

    Args:
        uncoded: the same without them; both with what a step is expected to take, if a clock plays it.
    """
    coded, bare = plan.step_seconds, uncoded.step_seconds
    if not coded or not bare or bare / coded >= WORTH_SAYING:
        return plan
    mine, plain = seconds_text(coded), seconds_text(bare)
    steps = f"simulated step {mine}, without them {plain}, exactly"
    if mine == plain:
        steps = f"simulated step {mine}, and without them the same, exactly"
    less = f"; less than {WORTH_SAYING - 1:.0%} is no help" if coded < bare and mine != plain else ""
    return replace(plan, notes=(*plan.notes, f"coded edges do not help at these links: {steps}{less}"))


def with_named_weighed(plan: Plan, exact: Plan) -> Plan:
    """The plan with a note where it is slower than the exact one by what it names that departs.

    Args:
        exact: the same without what is named; both with what a step is expected to take.
    """
    saved = 1 - exact.step_seconds / plan.step_seconds if plan.step_seconds else 0.0
    mine, other = seconds_text(plan.step_seconds), seconds_text(exact.step_seconds)
    if saved < WORTH_CHANGING or mine == other:
        return plan
    named = [*_taken(plan), *_coded_rows(plan)]
    departing = {name for group in plan.groups if group.exchange in named for name in group.parameters}
    ways = dict.fromkeys(str(group.exchange) for group in exact.groups if departing.intersection(group.parameters))
    note = (
        f"quicker at these links, and exact: {', '.join(ways)}, simulated step {other} instead of {mine} ({saved:.0%} "
        f"less). To take it, drop {', '.join(map(str, named))} from constraints (--exchange)"
    )
    return replace(plan, notes=(*plan.notes, note))


def _said_of_taken(plan: Plan) -> list[str]:
    taken = _taken(plan)
    said = [f"NOT exact: {choice}: {_costs(choice)}" for choice in taken]
    if taken and plan.workers == 1:
        said = [f"one worker: nothing crosses, so nothing is coded by {', '.join(map(str, taken))}"]
    return [*said, *(f"NOT exact: {choice}: {CODED_ROWS}" for choice in _coded_rows(plan))]


def _is_timed(question: Question) -> bool:
    processor = question.case.topology.processor
    return processor is not None and bool(processor.coding)


def _mildest(ways: Sequence[_Way], now: float) -> _Way | None:
    """Of those that are about the quickest the mildest, ways being in that order; None where the exact plan is."""
    limit = CLOSE * min([now, *(way.seconds for way in ways)])
    return None if now <= limit else next(way for way in ways if way.seconds <= limit)


def _fits(plan: Plan, question: Question) -> bool:
    return needed_bytes(plan, question.case) <= question.case.topology.memory_bytes


def _steps(way: _Way, now: float) -> str:
    mine, before = seconds_text(way.seconds), seconds_text(now)
    return "the simulated step as long" if mine == before else f"simulated step {mine} instead of {before}"


def _taken(plan: Plan) -> list[Choice]:
    """What departs, each once."""
    entries, found = dense_exchanges(), list[Choice]()
    for group in plan.groups:
        choice = group.exchange
        if choice is not None and choice.name in entries and entries[choice.name].departs and choice not in found:
            found.append(choice)
    return found


def _coded_rows(plan: Plan) -> list[Choice]:
    """Ways of tables whose rows or gradients are coded, each once."""
    ways = [group.exchange for group in plan.groups if group.exchange and group.exchange.name in row_exchanges()]
    coded = [way for way in ways if build_row(way.name, **way.options).codes.departs]
    return [way for number, way in enumerate(coded) if way not in coded[:number]]


def _costs(choice: Choice) -> str:
    """What it does, and what its options come to."""
    says = build_dense(choice.name, **choice.options).says
    return f"{dense_exchanges()[choice.name].costs}{f' ({says})' if says else ''}"


def _departing(question: Question) -> Iterator[Choice]:
    """Every way that departs and is worth pricing, the mildest first."""
    entries = dense_exchanges()
    for name in sorted(entries, key=lambda name: entries[name].mildness):
        ways = [way for fact in question.trained for way in entries[name].offers(fact, question.case.topology)]
        if entries[name].departs:
            yield from (Choice(name, way) for n, way in enumerate(ways) if way not in ways[:n])


def _ways(plan: Plan, question: Question, is_asked: bool) -> Iterator[_Way]:
    """Of the ways that depart alike and are not demanded: the quickest that fits, and the mildest that is about as
    quick, whatever hides behind what; with those that had to be played to know them. The mildest first. Where nobody
    asked, so that only a note names them, two are played at most: what bounds say is the quickest, and the mildest."""
    case = question.case
    every = [(choice, other) for choice in _departing(question) if (other := _by(choice, plan, question)) != plan]
    least, found = [least_seconds(other, case) for _, other in every], dict[int, _Way]()
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, (choice, _) in enumerate(every):
        alike.setdefault(dense_exchanges()[choice.name].departs, []).append(number)

    def play(number: int) -> float:
        choice, other = every[number]
        found[number] = _Way(choice, other, simulate(other, case).step_seconds)
        return found[number].seconds if _fits(other, question) else math.inf

    for numbers in alike.values():
        played: dict[int, float] = {}
        for number in sorted(numbers, key=least.__getitem__):
            if least[number] < min(played.values(), default=math.inf) and (is_asked or not played):
                played[number] = play(number)
        limit = CLOSE * min(played.values())
        for number in numbers:
            if number not in played and least[number] <= limit:
                played[number] = play(number)
            if played.get(number, math.inf) <= limit or (not is_asked and len(played) > 1):
                break
    yield from (found[number] for number in sorted(found))


def _by(choice: Choice, plan: Plan, question: Question) -> Plan:
    """The plan with every bucket that nobody demanded otherwise by that exchange, where it can carry it."""
    case: Case = question.case
    groups = []
    for group in plan.groups:
        facts = [case.profile.parameter(name) for name in group.parameters]
        if _is_free(group, question) and not any(why_not(fact, choice) for fact in facts):
            group = dense_group(group.name, group.parameters, choice, dense_forecast(facts, choice, case), group.reason)
        groups.append(group)
    return replace(plan, groups=tuple(groups), consensus=consensus_of(groups))


def _is_free(group: Group, question: Question) -> bool:
    is_asked = any(name in question.wanted for name in group.parameters)
    return is_ownerless(group.own_exchange) and not is_asked and not group.departures
