"""The ways one parameter may cross the workers, each with its price.

A table that is read by row has several; a parameter that some operation reads whole has one, unless the user demands
another. Constraints only take candidates away (or add the one they spell out), so what was forbidden can be shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.exchanges.exchange import row_exchanges
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Placement, Update
from armillary.planning.buckets import BucketLimits
from armillary.planning.constraints import Constraint, allows, placement_of
from armillary.planning.pricing import Case, dense_forecast, row_forecast

__all__ = ["Candidate", "Question", "allowed", "candidate", "candidates", "counts_of_owners"]


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


def counts_of_owners(workers: int) -> tuple[int, ...]:
    """Powers of two below the number of workers, and that number: 1, 2, 4, ..., N."""
    return (*(1 << power for power in range((workers - 1).bit_length())), workers)


def candidate(fact: ParameterFact, choice: Choice, question: Question) -> Candidate:
    """One way, priced."""
    if choice.name in row_exchanges():
        update: Update = "lazy" if fact.name in question.lazy else "exact"
        return Candidate(fact.name, choice, update, row_forecast(fact, choice, update, question.case))
    part = min(1.0, fact.bytes / question.limits.bytes)
    return Candidate(fact.name, choice, "exact", dense_forecast(fact.bytes, choice, question.case, part))


def candidates(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """Every way there is, and the one a constraint spells out if it is none of them. The simplest comes first.

    On one worker nothing crosses, so nothing but the plain way is offered.
    """
    demanded = question.wanted.get(fact.name)
    choices = [Choice("all_reduce")]
    if fact.shardable and question.case.topology.workers > 1:
        choices += _by_row(fact, question)
    if isinstance(demanded, Choice) and demanded not in choices:
        choices.append(demanded)
    if isinstance(demanded, str) and not any(allows(demanded, choice) for choice in choices):
        choices.append(Choice("owned_rows" if demanded == "row_sharded" else demanded))
    return tuple(candidate(fact, choice, question) for choice in choices)


def allowed(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """The candidates that honour the user's constraint."""
    demanded = question.wanted.get(fact.name)
    return tuple(one for one in candidates(fact, question) if allows(demanded, one.choice))


def _by_row(fact: ParameterFact, question: Question) -> list[Choice]:
    """Rows to everyone; to all workers as owners, dealt out in either order; to fewer owners; merged inside nodes."""
    topology = question.case.topology
    assert fact.rows is not None, fact
    orders: list[dict[str, str]] = [{}]
    if fact.rows.imbalance_hashed < fact.rows.imbalance_modulo:
        orders.append({"order": "hashed"})
    choices = [Choice("gather_rows"), *(Choice("owned_rows", order) for order in orders)]
    choices += [Choice("owned_rows", {"owners": count}) for count in counts_of_owners(topology.workers)[:-1]]
    if topology.nodes > 1 and topology.workers_per_node > 1:
        choices += [Choice("owned_rows_by_node", order) for order in orders]
    return choices
