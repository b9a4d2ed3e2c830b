"""From a choice per parameter to the groups of a plan, in the order in which gradients arrive, and their bucket size.

A table that is exchanged by row is a group of its own. Dense parameters share buckets with those of the same exchange.
Where an exchange has an owner and none is named, each parameter goes whole to the one that has fewest bytes so far,
which is how a naive parameter server places variables.

The smallest bucket size is taken that a clock finds about the fastest. Small buckets hide behind the backward pass.
Where links are about as fast as memory, or the backward is short, each of them costs more than it hides. Prices hide
nothing, so the simulator says.

Source: Li et al., PyTorch Distributed (VLDB 2020): the size of buckets as a trade, there set by hand.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from armillary.exchanges.exchange import build_dense, dense_exchanges, row_exchanges
from armillary.planning.activities import least_seconds
from armillary.planning.candidates import MIB, BucketLimits, Candidate, Question, arrival_of, buckets, default_limits
from armillary.planning.pricing import Case, dense_forecast, idle_round
from armillary.planning.simulator import quickest, simulate
from armillary.plans.group import Forecast, Group
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.plans.units import seconds_text

__all__ = ["WHOLE", "by_clock", "counted", "dense_group", "groups", "is_ownerless", "sizes", "with_idle_round"]

LARGE = BucketLimits(25 * MIB, 25 * MIB)  # DDP's
ONE = BucketLimits(sys.maxsize, sys.maxsize)
CLOSE = 0.005  # of a step: less is no difference


def sizes(backend: str) -> tuple[BucketLimits, ...]:
    """Smallest first."""
    return tuple(dict.fromkeys([default_limits(backend), LARGE, ONE]))


def by_clock(plans: Sequence[Plan], case: Case) -> tuple[Plan, ...]:
    """The first of them whose simulated step is about as short as any, then the others, each once. It has a note of
    it, if their steps differ in what is printed.

    Args:
        plans: the same in buckets of several sizes, smallest first.
    """
    found: dict[tuple[tuple[str, ...], ...], Plan] = {}
    for plan in plans:
        found.setdefault(tuple(group.parameters for group in plan.groups), plan)
    ordered = list(found.values())
    if len(ordered) == 1:
        return tuple(ordered)
    seconds, least = quickest(ordered, case), [least_seconds(plan, case) for plan in ordered]
    shortest = min(seconds.values())
    compute = sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages)
    scatter = case.topology.scatter * max(0.0, shortest - compute)  # of what exchanges add to it
    limit = (1 + CLOSE) * shortest + scatter
    for taken, plan in enumerate(ordered):
        if taken not in seconds and least[taken] <= limit:
            seconds[taken] = simulate(plan, case).step_seconds
        if seconds.get(taken, math.inf) <= limit:
            break
    others = *ordered[:taken], *ordered[taken + 1 :]
    spent = [seconds_text(seconds.get(place, bound)) for place, bound in enumerate(least)]
    if len(set(spent)) == 1:
        return ordered[taken], *others
    said = [text if place in seconds else f"at least {text}" for place, text in enumerate(spent)]
    steps = (f"in {counted(plan)} {text}" for plan, text in zip(ordered, said, strict=True))
    note = f"whole parameters travel in {counted(ordered[taken])}; simulated step {', '.join(steps)}"
    first = replace(ordered[taken], notes=(*ordered[taken].notes, note))
    return first, *others


def counted(plan: Plan) -> str:
    """How many buckets, in words."""
    count = sum(is_ownerless(group.own_exchange) for group in plan.groups)
    return f"{count} bucket{'s' * (count != 1)}"


def is_ownerless(choice: Choice) -> bool:
    """Whether it moves buckets alike on all ranks."""
    entry = dense_exchanges().get(choice.name)
    return entry is not None and not entry.owner_option


WHOLE = "read whole"
UNKNOWN = Forecast()


def groups(chosen: Mapping[str, Candidate], reasons: Mapping[str, str], question: Question) -> tuple[Group, ...]:
    """
    Args:
        chosen, reasons: by parameter name, for every trained parameter.
    """
    made: list[tuple[float, Group]] = []
    for fact in question.trained:
        one = chosen[fact.name]
        if one.choice.name in row_exchanges():
            reason = reasons[fact.name]
            group = Group(
                fact.name, (fact.name,), one.layout, one.choice,
                departures=one.departures, forecast=one.forecast, reason=reason,
            )  # fmt: skip
            made.append((arrival_of(fact), group))
    for choice, facts in _alike(chosen, question):
        for members in buckets(facts, question.limits):
            made.append((max(map(arrival_of, members)), _bucket(members, choice, reasons, question)))
    # Parameters without a gradient have no place in the order: they keep the model's.
    ordered = [group for _, group in sorted(made, key=lambda pair: pair[0])]
    numbered = _numbered(ordered)
    charged = with_idle_round(numbered, question.case.topology)
    return tuple(_told(group, alone.forecast.seconds) for group, alone in zip(charged, numbered, strict=True))


def _told(group: Group, alone_seconds: float) -> Group:
    """Its reason prices the table alone; what it is charged besides is said, so that both figures can be found."""
    more = group.forecast.seconds - alone_seconds
    if more < 1e-6 or not group.reason:
        return group
    return replace(group, reason=f"{group.reason}; {seconds_text(more)} more for one message that ends all lookups")


def _alike(chosen: Mapping[str, Candidate], question: Question) -> list[tuple[Choice, list[ParameterFact]]]:
    """Dense parameters by exchange and options; those that have an owner go one by one, and get it here."""
    alike: list[tuple[Choice, list[ParameterFact]]] = []
    load = [0] * question.case.topology.workers
    for fact in question.trained:
        choice = chosen[fact.name].choice
        if choice.name in row_exchanges():
            continue
        if option := dense_exchanges()[choice.name].owner_option:
            if option not in choice.options:
                owner = min(range(len(load)), key=load.__getitem__)
                load[owner] += fact.bytes
                choice = Choice(choice.name, {**choice.options, option: owner})
            alike.append((choice, [fact]))
            continue
        for other, facts in alike:
            if other == choice:
                facts.append(fact)
                break
        else:
            alike.append((choice, [fact]))
    return alike


def _bucket(members: Sequence[ParameterFact], choice: Choice, reasons: Mapping[str, str], question: Question) -> Group:
    names = tuple(fact.name for fact in members)
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(reasons[name], []).append(name)
    said = [_said(those, reason, len(members)) for reason, those in alike.items()]
    return dense_group("bucket", names, choice, dense_forecast(members, choice, question.case), "; ".join(said))


def dense_group(
    name: str, parameters: tuple[str, ...], choice: Choice, forecast: Forecast = UNKNOWN, reason: str = ""
) -> Group:
    """A group with what its exchange says of itself: how often it pushes, and in what it is not exact."""
    cadence = build_dense(choice.name, **choice.options).cadence
    departures = dense_exchanges()[choice.name].departs
    return Group(name, parameters, "replicated", choice, 0, cadence, departures, forecast, reason)


def _said(names: Sequence[str], reason: str, members: int) -> str:
    """A reason once, with the parameter that it is of, or how many."""
    if members == 1 or reason == WHOLE:
        return reason
    return f"{names[0] if len(names) == 1 else f'{len(names)} parameters'}: {reason}"


def _numbered(ordered: Sequence[Group]) -> list[Group]:
    """Buckets by their place among buckets; a parameter's name has no space, so they never clash."""
    number, named = 0, []
    for group in ordered:
        is_bucket = group.name == "bucket"
        named.append(replace(group, name=f"bucket {number}") if is_bucket else group)
        number += is_bucket
    return named


def with_idle_round(ordered: Sequence[Group], topology: Topology) -> tuple[Group, ...]:
    """The round that ends a step's look-ups is charged to the first row-sharded table."""
    charged = list(ordered)
    places = [place for place, group in enumerate(charged) if group.layout == "row_sharded"]
    for place in places[:1]:
        round_ = idle_round(topology, len(places))
        charged[place] = replace(charged[place], forecast=charged[place].forecast + round_)
    return tuple(charged)
