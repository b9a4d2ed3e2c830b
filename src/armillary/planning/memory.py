"""The cheapest choice for every parameter together, made to fit the memory of a rank; or what would fit.

What the fullest rank holds is the sum over groups and frozen parameters, and what the fullest moment of a step adds.
Owners of split tables are the same first ranks of each node, so their shares do add up.

Parameters are independent but for one thing: if any table is row-sharded, every step ends its look-ups with one more
round. So the best is either every parameter's own best, or the best with no table row-sharded. Inside the scatter of
what was measured the way that holds less is taken, else every fresh start would toss a coin for the memory.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from armillary.planning.candidates import Candidate, Question, allowed, peak_of
from armillary.planning.pricing import Case, idle_round
from armillary.planning.stage_plan import staged_ways
from armillary.plans.group import DEPARTURES, EXACT
from armillary.plans.plan import Plan
from armillary.plans.topology import Topology
from armillary.plans.units import bytes_text, enough_text

__all__ = [
    "NOISE",
    "Menu",
    "NothingFits",
    "cheapest",
    "fit",
    "margin",
    "menu",
    "needed_bytes",
    "refuse_too_large",
    "total_seconds",
]

Menu = Mapping[str, Sequence[Candidate]]

MOST_WORKERS = 1024
MOST_MICRO_BATCHES = 64


class NothingFits(ValueError):
    """No choice fits the memory of a rank; the message lists what would."""


def menu(question: Question) -> dict[str, tuple[Candidate, ...]]:
    """What may be chosen for every trained parameter."""
    return {fact.name: allowed(fact, question) for fact in question.trained}


def needed_bytes(plan: Plan, case: Case) -> float:
    """What a rank holds in the fullest moment of a step under a plan, frozen parameters too."""
    return _frozen_bytes(case) + plan.forecast.memory_bytes + plan.forecast.peak_bytes


def _frozen_bytes(case: Case) -> float:
    return sum(fact.bytes for fact in case.profile.parameters if not fact.requires_grad)


def memory_of(chosen: Mapping[str, Candidate], question: Question, batch_share: float = 1.0) -> float:
    """The same of a choice."""
    held = sum(one.forecast.memory_bytes for one in chosen.values())
    peak = peak_of([one.peak for one in chosen.values()], question.case, batch_share)
    return _frozen_bytes(question.case) + held + peak


def smallest(options: Menu, question: Question) -> dict[str, Candidate]:
    """Of three choices the one that needs least in a step: of every parameter what holds least, what does with its rows
    on their way, and what does without any."""

    def held(one: Candidate) -> float:
        return one.forecast.memory_bytes

    measures: tuple[Callable[[Candidate], Any], ...] = (
        held,
        lambda one: held(one) + one.peak.crossing_bytes,
        lambda one: (one.peak.crossing_bytes, held(one)),
    )
    choices = [{name: min(ways, key=measure) for name, ways in options.items()} for measure in measures]
    return min(choices, key=lambda chosen: memory_of(chosen, question))


def fit(chosen: Mapping[str, Candidate], options: Menu, question: Question) -> dict[str, Candidate]:
    """Exchanges choices for smaller ones, the fewest seconds per byte saved first, until all fits.

    Raises:
        ValueError: even the smallest choice does not fit; the message lists what would.
    """
    limit, fitted = question.case.topology.memory_bytes, dict(chosen)
    while memory_of(fitted, question) > limit:
        swaps = [
            ((way.forecast.seconds - fitted[name].forecast.seconds) / saved, name, way)
            for name, ways in options.items()
            for way in ways
            if (saved := fitted[name].forecast.memory_bytes - way.forecast.memory_bytes) > 0
        ]
        if not swaps:
            fitted = smallest(options, question)
            refuse_too_large(fitted, question)
            break
        _, name, way = min(swaps, key=lambda swap: swap[:2])
        fitted[name] = way
    return fitted


def refuse_too_large(chosen: Mapping[str, Candidate], question: Question) -> None:
    """
    Raises:
        ValueError: the choice does not fit; the message lists what would.
    """
    limit, needed = question.case.topology.memory_bytes, memory_of(chosen, question)
    if needed <= limit:
        return
    largest = max(chosen.values(), key=lambda one: one.forecast.memory_bytes)
    by_itself = [*_more_workers(question), *_smaller_batch(chosen, question)]
    remedies = [*_lazy(question), *_replaced(question), *(by_itself or _both(question)), *_stages(question)]
    remedies.append(f"ranks with {enough_text(needed)} of memory")
    listing = "\n".join(f"  {place}. {remedy}" for place, remedy in enumerate(remedies, 1))
    raise NothingFits(
        f"plan: nothing fits in {bytes_text(limit)} a rank; the smallest plan needs {bytes_text(needed)} (of it "
        f"{bytes_text(largest.forecast.memory_bytes)} for {largest.parameter!r} by {largest.choice}, activations "
        f"{bytes_text(_activations(question))}{_beside(chosen, question)}). Any of these would do:\n{listing}"
    )


def _beside(chosen: Mapping[str, Candidate], question: Question) -> str:
    """In words, what a step adds besides: rows on their way, whole gradients, temporaries of the optimizer."""
    more = peak_of([one.peak for one in chosen.values()], question.case) - _activations(question)
    return f", {bytes_text(more)} more in the fullest moment of a step" if more > 0 else ""


def _fits(question: Question) -> float:
    """What the smallest plan of another question needs, or 0 where it still does not fit."""
    needed = memory_of(smallest(menu(question), question), question)
    return needed if needed <= question.case.topology.memory_bytes else 0.0


def _lazy(question: Question) -> list[str]:
    tables = [fact.name for fact in question.trained if fact.shardable and fact.name not in question.lazy]
    needed = _fits(replace(question, lazy=question.lazy.union(tables))) if tables else 0.0
    names = ", ".join(map(repr, tables))
    return [f"lazy=[{names}] ({DEPARTURES['lazy']}): {bytes_text(needed)}"] if needed else []


def _replaced(question: Question) -> list[str]:
    """Constraints that keep a table whole on every rank, dropped."""
    whole = [fact.name for fact in question.trained if fact.shardable and fact.name in question.wanted]
    wanted = {name: demand for name, demand in question.wanted.items() if name not in whole}
    needed = _fits(replace(question, wanted=wanted)) if whole else 0.0
    names = ", ".join(map(repr, whole))
    return [f"layout row_sharded for {names}, by dropping the constraint: {bytes_text(needed)}"] if needed else []


def _more_workers(question: Question) -> list[str]:
    def remedy(larger: Topology) -> str:
        needed = _fits(_on(larger, question))
        return f"{_workers(larger)}: {bytes_text(needed)}" if needed else ""

    return _fewest(question.case.topology, remedy)


def _fewest(topology: Topology, remedy: Callable[[Topology], str]) -> list[str]:
    """The remedy, if there is one, with the fewest workers more, or nodes more.

    A rank needs less with each, or hardly more. So their number is doubled until it does, then bisected.

    Args:
        remedy: in words, for so many machines; empty if they would not do.
    """
    step = 1 if topology.nodes == 1 else topology.workers_per_node
    most = max(0, (MOST_WORKERS - topology.workers) // step)

    def said(steps: int) -> str:
        return remedy(topology.of(topology.workers + steps * step))

    doubled = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
    for too_few, enough in pairwise((0, *doubled)):
        if enough and said(enough):
            between = range(too_few + 1, enough + 1)
            return [said(between[bisect_left(between[:-1], True, key=lambda steps: bool(said(steps)))])]
    return []


def _on(topology: Topology, question: Question) -> Question:
    return replace(question, case=replace(question.case, topology=topology))


def _workers(topology: Topology) -> str:
    return f"{topology.workers} workers in {topology.nodes} node(s)"


def _smaller_batch(chosen: Mapping[str, Candidate], question: Question) -> list[str]:
    """Gradients of micro-batches add up, so what is cut smaller is not the step."""
    activations = _activations(question)
    room = question.case.topology.memory_bytes - memory_of(chosen, question, batch_share=0.0)
    return [_batches(activations, room)] if room > 0 else []


def _batches(activations: float, room: float) -> str:
    smaller = f"batches {activations / room:.1f} times smaller, whose activations take {bytes_text(room)}"
    return f"{smaller} ({math.ceil(activations / room)} micro-batches accumulated under run.no_sync() are one step)"


def _both(question: Question) -> list[str]:
    """The fewest workers on which micro-batches, if not too many, would fit."""
    limit, activations = question.case.topology.memory_bytes, _activations(question)

    def remedy(larger: Topology) -> str:
        there = _on(larger, question)
        room = limit - memory_of(smallest(menu(there), there), there, batch_share=0.0)
        if room * MOST_MICRO_BATCHES < activations:
            return ""
        return f"{_workers(larger)} with {_batches(activations, room)}"

    return _fewest(question.case.topology, remedy)


def _stages(question: Question) -> list[str]:
    """Each worker with a part of the model, if the profile's stages allow as many."""
    case = question.case
    if case.topology.workers == 1:
        return []
    return [
        f"layout stage_sharded, a stage a worker, by schedule {way.choice} "
        f"({'; '.join(DEPARTURES[word] for word in way.departures) or EXACT}): {bytes_text(way.held_bytes)} on the "
        f"fullest worker"
        for way in staged_ways(case)
        if way.held_bytes <= case.topology.memory_bytes
    ]


def _activations(question: Question) -> float:
    return question.case.profile.peak_bytes


NOISE = 0.1  # of seconds: less is no difference, however well they were measured


def margin(topology: Topology) -> float:
    """The share by which two prices must differ on these machines to be told apart."""
    return NOISE + topology.scatter


def total_seconds(chosen: Iterable[Candidate], topology: Topology) -> float:
    """What all exchanges of a step cost together."""
    chosen = list(chosen)
    rounds = idle_round(topology, sum(one.is_row_sharded for one in chosen))
    return sum(one.forecast.seconds for one in chosen) + rounds.seconds


def cheapest(options: Menu, topology: Topology) -> dict[str, Candidate]:
    """Fewest seconds, or about as few and less memory; among equals the one that is listed first."""
    close = margin(topology)
    own_best = {name: _best(ways, close) for name, ways in options.items()}
    without = {
        name: _least([way for way in ways if not way.is_row_sharded] or ways, topology.scatter)
        for name, ways in options.items()
    }
    apart = [name for name in options if own_best[name] != without[name]]
    at_stake = total_seconds((without[name] for name in apart), topology)
    lost = total_seconds(own_best.values(), topology) - total_seconds(without.values(), topology)
    held, whole = (sum(one[name].forecast.memory_bytes for name in apart) for one in (own_best, without))
    return own_best if lost <= (close * at_stake if held < whole else 0.0) else without


def _best(ways: Sequence[Candidate], close: float) -> Candidate:
    """The fastest; or by owners, if that holds less than the fastest and takes about as long."""
    spread, others = ([way for way in ways if way.is_row_sharded is by_owners] for by_owners in (True, False))
    fastest = _fastest(ways)
    limit = (1 + close) * fastest.forecast.seconds
    held = fastest.forecast.memory_bytes
    if less := [way for way in spread if way.forecast.memory_bytes < held and way.forecast.seconds <= limit]:
        return _fastest(less)
    return fastest if fastest.is_row_sharded else _least(others, close - NOISE)


def _least(ways: Sequence[Candidate], scatter: float) -> Candidate:
    """The one that holds least of those inside the scatter. Ways of one exchange ask for the same requests, so scatter
    leaves their order as it is."""
    names = dict.fromkeys(way.choice.name for way in ways)
    quickest = [_fastest([way for way in ways if way.choice.name == name]) for name in names]
    fastest = _fastest(quickest)
    limit = (1 + scatter) * fastest.forecast.seconds
    held = fastest.forecast.memory_bytes
    less = [way for way in quickest if way.forecast.seconds <= limit and way.forecast.memory_bytes < held]
    return min(less, key=lambda way: way.forecast.memory_bytes, default=fastest)


def _fastest(ways: Iterable[Candidate]) -> Candidate:
    return min(ways, key=lambda way: way.forecast.seconds)
