"""What exchanges that are not exact would bring: priced and said in notes, never taken unless they are demanded.

No price says what a departure does to the loss. So a plan stays exact, and a note says what the other way would save
here, what it costs, and how to ask for it.
"""

from collections.abc import Iterator
from dataclasses import replace

from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.facts.plan import Choice, Group, Plan
from armillary.facts.profile_table import seconds_text
from armillary.planning.assembly import consensus_of, dense_group
from armillary.planning.bucket_sizes import is_ownerless
from armillary.planning.candidates import Question
from armillary.planning.constraints import why_not
from armillary.planning.pricing import Case, dense_forecast
from armillary.planning.simulator import simulate

__all__ = ["with_savings"]

WORTH_SAYING = 1.15
MOST_NOTES = 3


def with_savings(plan: Plan, question: Question) -> Plan:
    """The plan with what is not exact about it, and with the ways that would shorten its step most."""
    said = [f"NOT exact: {choice}: {_costs(choice)}" for choice in _taken(plan)]
    found = sorted(_found(plan, question), key=lambda one: -one[0]) if question.case.topology.workers > 1 else []
    said += [note for ratio, note in found if ratio >= WORTH_SAYING][:MOST_NOTES]
    return replace(plan, notes=(*plan.notes, *said)) if said else plan


def _taken(plan: Plan) -> list[Choice]:
    """What departs, each once."""
    entries, found = dense_exchanges(), list[Choice]()
    for group in plan.groups:
        if group.own_exchange.name in entries and group.departures and group.own_exchange not in found:
            found.append(group.own_exchange)
    return found


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


def _found(plan: Plan, question: Question) -> list[tuple[float, str]]:
    """(how many times shorter the step would be, the note), of every way that departs and is not demanded."""
    choices = list(_departing(question))
    if not choices:
        return []
    now, found = simulate(plan, question.case).step_seconds, []
    for choice in choices:
        other = _by(choice, plan, question)
        if other == plan:
            continue
        then = simulate(other, question.case).step_seconds
        note = (
            f"would save {now / then:.1f}x at this link, NOT exact: {choice}: simulated step {seconds_text(then)} "
            f"instead of {seconds_text(now)}; {_costs(choice)}. To take it, demand it: constraints={{'*': "
            f"Choice.parse({str(choice)!r})}}"
        )
        found.append((now / then, note))
    return found


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
