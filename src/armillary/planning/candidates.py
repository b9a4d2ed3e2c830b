"""The ways one parameter may cross the workers, each with its price.

A table that is read by row has several; a parameter that some operation reads whole has one, unless the user demands
another. Constraints only take candidates away (or add the one they spell out), so what was forbidden can be shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.exchanges.exchange import dense_exchanges, row_exchanges
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Placement, Update
from armillary.planning.buckets import BucketLimits
from armillary.planning.constraints import Constraint, allows, placement_of
from armillary.planning.parallax import plain
from armillary.planning.pricing import Case, dense_forecast, row_forecast

__all__ = ["Candidate", "Question", "allowed", "candidate", "candidates"]


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
    """One way for one parameter. forecast: of the parameter alone; in a bucket it pays its part of the latency."""

    parameter: str
    choice: Choice
    update: Update
    forecast: Forecast

    @property
    def placement(self) -> Placement:
        return placement_of(self.choice)

    @property
    def is_row_sharded(self) -> bool:
        return self.placement == "row_sharded"


def candidate(fact: ParameterFact, choice: Choice, question: Question) -> Candidate:
    """One way, priced."""
    if choice.name in row_exchanges():
        update: Update = "lazy" if fact.name in question.lazy else "exact"
        return Candidate(fact.name, choice, update, row_forecast(fact, choice, update, question.case))
    goes_alone = dense_exchanges()[choice.name].owner_option
    part = 1.0 if goes_alone else min(1.0, fact.bytes / question.limits.bytes)
    return Candidate(fact.name, choice, "exact", dense_forecast(fact.bytes, choice, question.case, part, [fact]))


def candidates(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """Every way that an exchange offers, and the one a constraint spells out if it is none of them. Dense ways come
    first; among equals the first is taken.

    On one worker nothing crosses, so nothing is offered by row.
    """
    demanded, topology = question.wanted.get(fact.name), question.case.topology
    exchanges = {**dense_exchanges(), **(row_exchanges() if fact.shardable and topology.workers > 1 else {})}
    choices = [Choice(name, way) for name, entry in exchanges.items() for way in entry.offers(fact, topology)]
    if isinstance(demanded, Choice) and demanded not in choices:
        choices.append(demanded)
    if isinstance(demanded, str) and not any(allows(demanded, choice) for choice in choices):
        choices.append(plain(demanded))
    return tuple(candidate(fact, choice, question) for choice in choices)


def allowed(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """The candidates that honour the user's constraint."""
    demanded = question.wanted.get(fact.name)
    return tuple(one for one in candidates(fact, question) if allows(demanded, one.choice))
