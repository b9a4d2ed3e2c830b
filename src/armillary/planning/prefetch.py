"""Adds prefetch to a plan: which of its tables are prefetched, what of them may go early, what that sends and saves.

Rows may go before a step only where it is provable that they stay put: the optimizer leaves rows without gradient
alone, or the table is lazy; and gradients may follow it where nobody reads their rows next. Both happen where that
makes the simulated step shorter. Otherwise ids and counts go early, and rows right after the step. All are exact. How
many rows stay put is taken from the profile (`traffic.staying_share`): those that no worker read in the step before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from armillary.exchanges.exchange import RowExchange, build_row, row_exchanges
from armillary.exchanges.look_up import PREDICTED, announcement_bytes, round_leg
from armillary.planning.activities import least_seconds, payer
from armillary.planning.link_costs import leg_seconds, staying_share
from armillary.planning.pricing import Case, assumptions_behind, idle_leg, row_forecast, row_work
from armillary.planning.quicker_ways import OtherWay
from armillary.planning.simulator import quickest, simulate
from armillary.plans.group import Forecast, Group, PrefetchKind
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import seconds_text

__all__ = [
    "looking_ahead",
    "prefetchable",
    "prefetching",
    "prefetching_as_asked",
    "prefetching_by_price",
    "with_announcements",
]

NOTE = "bytes are forecast for a loop over run.batches in which every look-up of tables that prefetch is prefetched"
OFF = "prefetch is off, as it brings too little"
HOW = "parallelize(..., prefetch=True) or train --autotune 4, for loops over run.batches"
BY_PRICE = "prefetch was taken by price, since the loader is torch's own; prefetch=False leaves it"
NO_TABLE = "prefetch was asked for and is not taken: no table of this plan is dealt out by row"
WORTH = 1.02  # a gain below it is none: the clock knows neither waits nor crowds
TIE = 1.005  # between kinds of prefetch


def prefetching(plan: Plan, profile: Profile, topology: Topology, *, may_wait: bool = True) -> Plan:
    """The same plan for loops over `run.batches`, with every table by `owned_rows` prefetched; or the plan itself, if
    it has none, or prefetches already.

    Bytes are forecast as if every look-up were prefetched; one that is not sends a header more. The seconds of its
    groups hide nothing, so they are more than without; what is hidden the simulator says, in the notes.

    Args:
        profile, topology: what the plan was made from.
        may_wait: whether gradients may follow in the next batch; all ranks must then do alike with a table's `.grad`.

    Raises:
        ValueError: the plan is for another model, its schedule is not simultaneous, or nobody priced it.
    """
    names = prefetchable(plan)
    if not names:
        return plan
    case = Case(profile, topology, assumptions_behind(plan))
    before_seconds = simulate(plan, case).step_seconds
    ahead = _prefetching_plan(plan, names, case, may_wait)
    return replace(ahead, notes=(*plan.notes, NOTE, _gain(before_seconds, ahead, case)))


def prefetching_as_asked(plan: Plan, profile: Profile, topology: Topology) -> Plan:
    """The same plan looking ahead; or with a note why nothing does."""
    ahead = prefetching(plan, profile, topology)
    return replace(plan, notes=(*plan.notes, NO_TABLE)) if ahead is plan else ahead


def prefetching_by_price(plan: Plan, profile: Profile, topology: Topology) -> Plan:
    """The same plan looking ahead if a step against a clock is shorter for it, else with a note of what it would be;
    arguments as `prefetching`'s. No gradient waits: nobody asked for what that demands of the loop."""
    ahead = prefetching(plan, profile, topology, may_wait=False)
    if ahead is plan or plan.workers == 1:
        return plan
    case = Case(profile, topology, assumptions_behind(plan))
    before_seconds = simulate(plan, case).step_seconds
    if before_seconds >= WORTH * simulate(ahead, case).step_seconds:
        return replace(ahead, notes=(*ahead.notes, BY_PRICE))
    return replace(plan, notes=(*plan.notes, f"{OFF}: {_steps(before_seconds, ahead, case)}"))


def looking_ahead(plan: Plan, case: Case) -> Iterator[OtherWay]:
    """The same plan with prefetch, if it has tables that could and gains by it."""
    names = prefetchable(plan)
    if not names or plan.workers == 1:
        return
    before_seconds = simulate(plan, case).step_seconds
    after_seconds = simulate(_prefetching_plan(plan, names, case), case).step_seconds
    if before_seconds >= WORTH * after_seconds:
        yield OtherWay("prefetch", True, before_seconds, after_seconds, HOW)


def _gain(before_seconds: float, ahead: Plan, case: Case) -> str:
    """What a step takes against a clock, and what that rests on."""
    rows = {"rows": 1, "gradients": 2}
    stays = _shares(ahead, rows, case)
    early = f"; rows that may go before the step: {stays}" if stays else ""
    rests = _shares(ahead, {"gradients": 1}, case)
    waiting = f"; gradients that may follow it: {rests}" if rests else ""
    return f"{_steps(before_seconds, ahead, case)}{early}{waiting}"


def _steps(before_seconds: float, ahead: Plan, case: Case) -> str:
    after, before = seconds_text(simulate(ahead, case).step_seconds), seconds_text(before_seconds)
    if after == before:
        return f"simulated step {after} with prefetch and without"
    return f"simulated step {after} with prefetch, {before} without"


def _shares(plan: Plan, steps: Mapping[str, int], case: Case) -> str:
    """In words, of the tables that prefetch so: which of their rows nobody else reads in so many steps."""
    found = []
    for group in plan.groups:
        rows = case.profile.parameter(group.parameters[0]).rows
        if group.prefetch in steps and rows is not None:
            share = staying_share(rows, case.profile, case.topology.workers, steps[group.prefetch])
            found.append(f"{share:.0%} of {group.parameters[0]}")
    return ", ".join(found)


def prefetchable(plan: Plan) -> list[str]:
    """The groups that could prefetch, which are none if any does."""
    return [] if plan.looks_ahead else [group.name for group in plan.groups if _can_be_early(group)][:PREDICTED]


def _can_be_early(group: Group) -> bool:
    return group.own_exchange.name in row_exchanges() and _exchange(group).pull_early is not None


def _exchange(group: Group) -> RowExchange:
    return build_row(group.own_exchange.name, **group.own_exchange.options)


def _prefetching_plan(plan: Plan, names: Sequence[str], case: Case, may_wait: bool = True) -> Plan:
    """Rows go early and gradients follow late where they may and a step against a clock is shorter for it, else ids
    alone: what goes in two parts is more messages, and on quick links with busy processors a message costs more than
    what it hides."""
    may_send = {g.name for g in plan.groups if g.is_lazy or not _moves_quiet_rows(g, case)} & set(names)
    waits = {g.name for g in plan.groups if may_wait and g.name in may_send and _exchange(g).part is not None}
    sending: dict[str, PrefetchKind] = dict.fromkeys(may_send, "rows")
    waiting: dict[str, PrefetchKind] = {**sending, **dict.fromkeys(waits, "gradients")}
    choices = [_with_kinds(plan, names, kinds, case) for kinds in (waiting, sending, {})]
    if waits:  # gradients that wait hide more than the clock knows
        first = simulate(choices[0], case).step_seconds
        others = [one for one in choices[1:] if first >= TIE * least_seconds(one, case)]
        if not others or first < TIE * min(quickest(others, case).values()):
            return choices[0]
    seconds = quickest(choices, case)
    return choices[min(seconds, key=lambda place: (seconds[place], place))]


def _moves_quiet_rows(group: Group, case: Case) -> bool:
    """Or may not be stepped in two parts, as one that counts its steps by gradients that list rows."""
    found = [case.assumptions.of(name) for name in group.parameters]
    return any(one.moves_quiet_rows or one.lists_rows for one in found)


def _with_kinds(plan: Plan, names: Sequence[str], sending: Mapping[str, PrefetchKind], case: Case) -> Plan:
    """sending: how those groups of `names` prefetch that may do more than send ids."""
    kinds: dict[str, PrefetchKind] = {name: sending.get(name, "ids") for name in names}
    groups = [replace(group, prefetch=kinds.get(group.name, group.prefetch)) for group in plan.groups]
    return replace(plan, groups=with_announcements(groups, case))


def with_announcements(groups: Sequence[Group], case: Case) -> tuple[Group, ...]:
    """The same groups; to the forecast of those that prefetch comes what it takes and saves."""
    names = [group.name for group in groups if group.prefetch != "none"]
    if not names:
        return tuple(groups)
    paying = payer(groups)
    made = [_prefetched(group, case, group.name == paying) if group.name in names else group for group in groups]
    once = _spoken(made, len(names), case)
    return tuple(replace(group, forecast=group.forecast + once) if group.name == paying else group for group in made)


def _spoken(groups: Sequence[Group], prefetched: int, case: Case) -> Forecast:
    """The round in which the loop gets its batch, and what all headers of a step grow by: every one says which batches
    are expected."""
    pulled = [group for group in groups if group.layout == "row_sharded"]
    idle, plain = (idle_leg(case.topology, len(pulled), count) for count in (prefetched, 0))
    grown = [(idle, plain)]
    for group in pulled:
        fact = case.profile.parameter(group.parameters[0])
        for header in row_work(fact, group.own_exchange, group.is_lazy, case, group.prefetch).headers:
            grown.append((round_leg(header.messages, case.topology, announcement_bytes(prefetched)), header))
    more, less = [idle, *(leg for leg, _ in grown)], [leg for _, leg in grown]
    sent = sum(leg.link_bytes for leg in more) - sum(leg.link_bytes for leg in less)
    return Forecast(sent, 0.0, leg_seconds(more, case.topology) - leg_seconds(less, case.topology))


def _prefetched(group: Group, case: Case, pays: bool) -> Group:
    """The forecast changes by what prefetch changes of the table's own; rounds it was charged with stay in it."""
    fact = case.profile.parameter(group.parameters[0])
    before = row_forecast(fact, group.own_exchange, group.is_lazy, case)
    after = row_forecast(fact, group.own_exchange, group.is_lazy, case, group.prefetch, pays)
    more = Forecast(after.sent_bytes - before.sent_bytes, 0.0, after.seconds - before.seconds)
    return replace(group, forecast=group.forecast + more)
