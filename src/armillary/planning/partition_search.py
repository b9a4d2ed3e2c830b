"""Over how many workers the rows of a table are split under Parallax's rule: a search over a few timed trials.

More partitions share the work of the owners, and each costs something of its own: seconds = theta0 + theta1 / P +
theta2 P. A few numbers of partitions are timed by doubling and halving, the model is fitted, and the best whole number
between the smallest and the largest tried is taken. Seconds are those of exchanges timed in the job
(`session/plan_job.py`), else of the forecast. A table for which the user spells out an exchange with its options
has nothing to search.

Source: Parallax (Kim et al., EuroSys 2019, partitioning) and its code (`common/partitions.py`). Departures: every table
is searched for itself, up to the number of workers. A trial is a call, not a new launch of the job, and one that cannot
run ends the doubling, not the search. theta1 and theta2 are not let below zero. Three numbers are tried where there are
so many, since fewer cannot be fitted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from armillary.exchanges.exchange import row_exchanges
from armillary.planning.candidates import Question, candidate, ruled
from armillary.planning.constraints import allows
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.units import seconds_text

__all__ = [
    "CostModel",
    "OwnerSearch",
    "Search",
    "SearchedTable",
    "Trial",
    "best_partitions",
    "by_forecast",
    "fit",
    "note",
    "search",
    "searched_tables",
]

FEWEST_TO_FIT = 3


class Trial(NamedTuple):
    """A measured number of partitions; infinite seconds where it could not run."""

    partitions: int
    seconds: float


class CostModel(NamedTuple):
    """seconds = theta0 + theta1 / P + theta2 P."""

    theta0: float
    theta1: float
    theta2: float

    def seconds(self, partitions: float) -> float:
        return self.theta0 + self.theta1 / partitions + self.theta2 * partitions


class Search(NamedTuple):
    """What was tried and what came of it. model: None where too few trials could run for a fit."""

    chosen: int
    trials: tuple[Trial, ...]
    model: CostModel | None

    def __str__(self) -> str:
        lines = ["partitions  measured ms  fitted ms"]
        for partitions, seconds in self.trials:
            fitted = "-" if self.model is None else f"{self.model.seconds(partitions) * 1e3:.3f}"
            measured = "failed" if math.isinf(seconds) else f"{seconds * 1e3:.3f}"
            mark = " <- chosen" if partitions == self.chosen else ""
            lines.append(f"{partitions:>10}  {measured:>11}  {fitted:>9}{mark}")
        if self.chosen not in [partitions for partitions, _ in self.trials] and self.model is not None:
            lines.append(f"{self.chosen:>10}  {'-':>11}  {self.model.seconds(self.chosen) * 1e3:>9.3f} <- chosen")
        return "\n".join(lines)


def fit(trials: Sequence[Trial]) -> CostModel:
    """Least squares with theta1, theta2 >= 0: the best of the fits in which one or both are held at zero.

    Raises:
        ValueError: fewer than three different numbers of partitions.
    """
    partitions = np.array([float(trial.partitions) for trial in trials])
    seconds = np.array([trial.seconds for trial in trials])
    if len(set(partitions.tolist())) < FEWEST_TO_FIT or not np.isfinite(seconds).all() or partitions.min() < 1:
        raise ValueError(
            f"partitions: want {FEWEST_TO_FIT} numbers of partitions or more with finite seconds, got {list(trials)}"
        )
    columns = np.stack([np.ones_like(partitions), 1 / partitions, partitions], axis=1)
    best, best_residual = CostModel(0.0, 0.0, 0.0), math.inf
    for kept in ([0, 1, 2], [0, 1], [0, 2], [0]):
        theta = np.zeros(3)
        theta[kept] = np.linalg.lstsq(columns[:, kept], seconds, rcond=None)[0]
        residual = float(((columns @ theta - seconds) ** 2).sum())
        if theta[1] >= 0 and theta[2] >= 0 and residual < best_residual:
            best, best_residual = CostModel(*theta.tolist()), residual
    return best


def best_partitions(model: CostModel, fewest: int, most: int) -> int:
    """The whole number in [fewest, most] with the fewest seconds; the smaller of equals."""
    return min(range(fewest, most + 1), key=model.seconds)


def search(seconds: Callable[[int], float], start: int, fewest: int = 1, most: int = 1 << 20) -> Search:
    """Doubles from `start` while the time falls, then halves from below it while the time falls; fits, and chooses.

    Args:
        seconds: times one number of partitions; infinity says that it cannot run (out of memory).
        start: the first to be tried, for example the number of nodes. fewest, most: bounds of what may be tried.

    Raises:
        ValueError: the bounds are empty or exclude `start`; or nothing could run.
    """
    if not 1 <= fewest <= start <= most:
        raise ValueError(f"partitions: want 1 <= fewest <= start <= most, got {fewest}, {start}, {most}")
    failed: list[Trial] = []
    first = Trial(start, seconds(start))
    while math.isinf(first.seconds) and 2 * first.partitions <= most:
        failed.append(first)  # fewer partitions will not run either
        first = Trial(2 * first.partitions, seconds(2 * first.partitions))
    if math.isinf(first.seconds):
        raise ValueError(f"partitions: none of {[trial.partitions for trial in (*failed, first)]} could run")
    lowest = first.partitions if failed else fewest
    upward = _while_falling(seconds, first, lambda partitions: _doubled(partitions, most), lowest, most)
    downward = _while_falling(seconds, first, lambda partitions: partitions // 2, lowest, most)
    trials = [*failed, first, *upward, *downward]
    return _chosen([*trials, *_lacking(seconds, trials, lowest, most)])


def _lacking(seconds: Callable[[int], float], trials: Sequence[Trial], lowest: int, most: int) -> list[Trial]:
    """What more is tried for a fit: above what was tried, then below."""
    ran = [trial.partitions for trial in trials if math.isfinite(trial.seconds)]
    tried = [trial.partitions for trial in trials]
    above, below = [_doubled(max(tried), most)], [min(tried) // 2]
    above.append(_doubled(above[0], most))
    below.append(below[0] // 2)
    able = [partitions for partitions in (*above, *below) if lowest <= partitions <= most]
    return [Trial(partitions, seconds(partitions)) for partitions in able[: max(0, FEWEST_TO_FIT - len(ran))]]


def _doubled(partitions: int, most: int) -> int:
    """Not past the most, which is tried too where doubling misses it."""
    return min(2 * partitions, most) if partitions < most else most + 1


def _while_falling(
    seconds: Callable[[int], float], first: Trial, following: Callable[[int], int], lowest: int, most: int
) -> list[Trial]:
    """Trials after `first` inside the bounds, up to and with the first that takes longer than the one before it."""
    trials, before = [], first
    while lowest <= (partitions := following(before.partitions)) <= most:
        trials.append(Trial(partitions, seconds(partitions)))
        if trials[-1].seconds >= before.seconds:
            break
        before = trials[-1]
    return trials


def _chosen(trials: Sequence[Trial]) -> Search:
    ran = [trial for trial in trials if math.isfinite(trial.seconds)]
    ordered = tuple(sorted(trials))
    if len(ran) < FEWEST_TO_FIT:
        return Search(min(ran, key=lambda trial: trial.seconds).partitions, ordered, None)
    model, tested = fit(ran), [trial.partitions for trial in ran]
    return Search(best_partitions(model, min(tested), max(tested)), ordered, model)


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
