"""Over how many workers the rows of a table are split under Parallax's rule: what is searched, and what is said of it.

Seconds are those of exchanges timed in the job, where there is one to be timed in (`session/owners.py`), else those of
the forecast. A table for which the user spells out an exchange with its options has nothing to search.

Source: Parallax (Kim et al., EuroSys 2019, partitioning). Departures: every table is searched for itself, where
Parallax takes one number for all; partitions are the workers that own them, so there are never more than workers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary.exchanges.exchange import row_exchanges
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice
from armillary.facts.profile_table import seconds_text
from armillary.planning.candidates import Question, candidate, ruled
from armillary.planning.constraints import allows
from armillary.planning.partitions import Search, search

__all__ = ["OwnerSearch", "SearchedTable", "by_forecast", "note", "searched_tables"]

COPIES = 2  # of its rows that an owner holds at least: weight and gradient


@dataclass(frozen=True)
class SearchedTable:
    """A table as a trial needs it.

    Args of note:
        distinct_rows: that one worker reads in a step. exchange, option: whose option is the number of owners.
        fewest: owners that can hold it. start: the first number to try. workers: the most.
    """

    name: str
    rows: int
    row_numel: int
    dtype: str
    distinct_rows: int
    exchange: str
    option: str
    fewest: int
    start: int
    workers: int

    def way(self, owners: int) -> Choice:
        """The exchange with so many owners; all of them need not be said."""
        options: dict[str, Any] = {} if owners == self.workers else {self.option: owners}
        return Choice(self.exchange, options)

    def searched(self, seconds: Callable[[Choice], float]) -> Search:
        return search(lambda owners: seconds(self.way(owners)), self.start, self.fewest, self.workers)


@dataclass(frozen=True)
class OwnerSearch:
    """How many owners a table gets, and by what. is_timed: seconds are of exchanges in this job."""

    table: SearchedTable
    found: Search
    is_timed: bool

    @property
    def choice(self) -> Choice:
        return self.table.way(self.found.chosen)


def searched_tables(question: Question) -> tuple[SearchedTable, ...]:
    """Those that the rule gives owners, in the model's order."""
    if question.case.topology.workers == 1:
        return ()
    tables = (_searched_table(fact, question) for fact in question.trained)
    return tuple(table for table in tables if table is not None)


def _searched_table(fact: ParameterFact, question: Question) -> SearchedTable | None:
    demanded, rule, topology = question.wanted.get(fact.name), ruled(fact, question), question.case.topology
    entry = row_exchanges().get(rule.name)
    if fact.rows is None or entry is None or isinstance(demanded, Choice) or not allows(demanded, rule):
        return None
    fewest = min(topology.workers, max(1, math.ceil(COPIES * fact.bytes / topology.memory_bytes)))
    return SearchedTable(
        fact.name, fact.shape[0], math.prod(fact.shape[1:]), fact.dtype,
        round(fact.rows.alpha_worker * fact.rows.rows),
        rule.name, entry.owner_option, fewest, max(fewest, topology.nodes), topology.workers,
    )  # fmt: skip


def by_forecast(table: SearchedTable, question: Question) -> OwnerSearch:
    """For machines that are not here."""
    return OwnerSearch(table, table.searched(lambda way: _forecast(table, way, question)), is_timed=False)


def _forecast(table: SearchedTable, way: Choice, question: Question) -> float:
    return candidate(question.case.profile.parameter(table.name), way, question).forecast.seconds


def note(one: OwnerSearch, question: Question) -> str:
    """What was tried, what each took and was forecast to take, and what was fitted."""
    table, found = one.table, one.found
    tried = []
    for owners, seconds in found.trials:
        forecast = seconds_text(_forecast(table, table.way(owners), question))
        took = f"{seconds_text(seconds)} (forecast {forecast})" if one.is_timed else forecast
        tried.append(f"{owners}: {took}")
    how = "exchanges timed in this job before the plan" if one.is_timed else "forecasts, as nothing was timed"
    if found.model is None:
        fitted = "too few numbers for a fit, the fastest is taken"
    else:
        a, b, c = found.model
        at = seconds_text(found.model.seconds(found.chosen))
        fitted = f"fitted {a * 1e3:.3g} + {b * 1e3:.3g} / owners + {c * 1e3:.3g} owners ms, {at} at {found.chosen}"
    return (
        f"{table.name}: {found.chosen} of {table.workers} workers own its rows, searched over {how}: "
        f"{', '.join(tried)}; {fitted}"
    )
