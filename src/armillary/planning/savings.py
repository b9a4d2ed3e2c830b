"""What exchanges that are not exact would bring: priced and said in notes, never taken unless they are demanded.

No price says what a departure does to the loss. So a plan stays exact, and a note says what the other way would save
here, what it costs, and how to ask for it.
"""

from dataclasses import replace

from armillary.exchanges.exchange import dense_exchanges
from armillary.facts.plan import Choice, Plan
from armillary.facts.profile_table import seconds_text
from armillary.planning.assembly import consensus_of, dense_group
from armillary.planning.bucket_sizes import is_ownerless
from armillary.planning.candidates import Question
from armillary.planning.pricing import Case, dense_forecast
from armillary.planning.simulator import simulate

__all__ = ["with_savings"]

WORTH_SAYING = 1.15
MOST_NOTES = 3


def with_savings(plan: Plan, question: Question) -> Plan:
    """The plan with what is not exact about it, and with the ways that would shorten its step most."""
    entries = dense_exchanges()
    taken = {group.own_exchange.name: group for group in plan.groups if group.own_exchange.name in entries}
    said = [f"NOT exact: {group.exchange}: {entries[name].costs}" for name, group in taken.items() if group.departures]
    found = sorted(_found(plan, question), key=lambda one: -one[0]) if question.case.topology.workers > 1 else []
    said += [note for ratio, note in found if ratio >= WORTH_SAYING][:MOST_NOTES]
    return replace(plan, notes=(*plan.notes, *said)) if said else plan


def _found(plan: Plan, question: Question) -> list[tuple[float, str]]:
    """(how many times shorter the step would be, the note), of every way that departs and is not demanded."""
    choices: list[Choice] = []
    for name, entry in dense_exchanges().items():
        ways = [way for fact in question.trained for way in entry.offers(fact, question.case.topology)]
        choices += [Choice(name, way) for n, way in enumerate(ways) if entry.departs and way not in ways[:n]]
    if not choices:
        return []
    now, found = simulate(plan, question.case).step_seconds, []
    for choice in choices:
        other = _by(choice, plan, question)
        if other == plan:
            continue
        then = simulate(other, question.case).step_seconds
        entry = dense_exchanges()[choice.name]
        note = (
            f"would save {now / then:.1f}x at this link, NOT exact: {choice}: simulated step {seconds_text(then)} "
            f"instead of {seconds_text(now)}; {entry.costs}. To take it, demand it: constraints={{'*': "
            f"Choice.parse({str(choice)!r})}}"
        )
        found.append((now / then, note))
    return found


def _by(choice: Choice, plan: Plan, question: Question) -> Plan:
    """The plan with every bucket that nobody demanded otherwise by that exchange."""
    case: Case = question.case
    groups = []
    for group in plan.groups:
        is_free = not any(name in question.wanted for name in group.parameters)
        if is_free and is_ownerless(group.own_exchange) and not group.departures:
            facts = [case.profile.parameter(name) for name in group.parameters]
            group = dense_group(group.name, group.parameters, choice, dense_forecast(facts, choice, case), group.reason)
        groups.append(group)
    return replace(plan, groups=tuple(groups), consensus=consensus_of(groups))
