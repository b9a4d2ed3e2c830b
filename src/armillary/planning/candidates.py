"""The ways one parameter may cross the workers, each with its price.

A table that is read by row has several; a parameter that some operation reads whole has one, unless the user demands
another. Constraints only take candidates away (or add the one they spell out), so what was forbidden can be shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.exchanges.exchange import build_row, dense_exchanges, row_exchanges
from armillary.facts.departure import checked
from armillary.facts.group import Layout
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast
from armillary.planning.buckets import BucketLimits
from armillary.planning.constraints import allows, layout_of, why_not
from armillary.planning.demand import Constraint
from armillary.planning.parallax import LISTED, PLAIN, parallax, plain
from armillary.planning.peak import PeakPart, peak_part
from armillary.planning.pricing import Case, dense_forecast, row_forecast

__all__ = ["Candidate", "Question", "allowed", "candidate", "candidates", "ruled"]


@dataclass(frozen=True)
class Question:
    """What is to be decided.

    Args of note:
        wanted: what is demanded of parameters, by name. lazy: tables whose quiet rows may stay put.
    """

    case: Case
    wanted: Mapping[str, Constraint]
    lazy: frozenset[str]
    limits: BucketLimits

    @property
    def trained(self) -> tuple[ParameterFact, ...]:
        return tuple(fact for fact in self.case.profile.parameters if fact.requires_grad)


@dataclass(frozen=True)
class Candidate:
    """One way for one parameter. forecast: of the parameter alone; in a bucket it pays its part of the latency. peak:
    what it brings to the fullest moment of a step."""

    parameter: str
    choice: Choice
    departures: tuple[str, ...]
    forecast: Forecast
    peak: PeakPart

    @property
    def layout(self) -> Layout:
        return layout_of(self.choice)

    @property
    def is_row_sharded(self) -> bool:
        return self.layout == "row_sharded"


def candidate(fact: ParameterFact, choice: Choice, question: Question) -> Candidate:
    """One way, priced."""
    peak = peak_part(fact, choice, fact.name in question.lazy, question.case)
    if choice.name in row_exchanges():
        is_lazy = fact.name in question.lazy
        forecast = row_forecast(fact, choice, is_lazy, question.case)
        departs = build_row(choice.name, **choice.options).codes.departs
        return Candidate(fact.name, choice, checked([*departs, *["lazy"] * is_lazy]), forecast, peak)
    entry = dense_exchanges()[choice.name]
    part = 1.0 if entry.owner_option else min(1.0, fact.bytes / question.limits.bytes)
    return Candidate(fact.name, choice, entry.departs, dense_forecast([fact], choice, question.case, part), peak)


def candidates(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """Every way that an exact exchange offers, and the one a constraint spells out if it is none of them: what departs
    from exact is demanded or not taken. Dense ways come first; among equals the first is taken.

    On one worker nothing crosses, so nothing is offered by row.
    """
    demanded, topology = question.wanted.get(fact.name), question.case.topology
    upkeep = question.case.assumptions.of(fact.name)
    by_row = fact.shardable and topology.workers > 1 and not upkeep.stays_whole
    exchanges = {**dense_exchanges(), **(row_exchanges() if by_row else {})}
    choices = [
        Choice(name, way)
        for name, entry in exchanges.items()
        for way in entry.offers(fact, topology)
        if (not entry.departs or name == demanded) and (name in row_exchanges() or not why_not(fact, Choice(name, way)))
    ]
    if upkeep.mixes_rows:
        choices = [choice for choice in choices if layout_of(choice) != "row_sharded"]
    if upkeep.lists_rows:
        choices = [LISTED, *(choice for choice in choices if choice.name in row_exchanges())]
    if isinstance(demanded, Choice) and demanded not in choices:
        choices.append(demanded)
    if isinstance(demanded, str) and not any(allows(demanded, choice) for choice in choices):
        choices.append(plain(demanded))
    return tuple(candidate(fact, choice, question) for choice in choices)


def ruled(fact: ParameterFact, question: Question) -> Choice:
    """Parallax's choice, where the parameter's optimizer can be split by row."""
    upkeep = question.case.assumptions.of(fact.name)
    if upkeep.lists_rows and not fact.shardable:
        return LISTED
    return PLAIN["replicated"] if upkeep.mixes_rows else parallax(fact)


def allowed(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """The candidates that honour the user's constraint."""
    demanded = question.wanted.get(fact.name)
    return tuple(one for one in candidates(fact, question) if allows(demanded, one.choice))
