"""What a plan whose schedule cuts the model says of the tables it keeps by row, and of ranks side by side.

A table goes by row only where the user asks for it. Every micro-batch pulls its rows, so bytes are those of one look-up
times the micro-batches; in a pipeline one process reads and all serve. A push a step takes the gradients back, after
one more round in which ranks say from which tables they learnt. An owner keeps, of a stale table, what the last step
changed: the touched rows where the optimizer leaves the others alone, else its whole shard.

Source: Kim et al., EuroSys 2019; Fournier & Oyallon, 2024.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from armillary.exchanges.exchange import RankInfo, build_row
from armillary.exchanges.leg import Leg
from armillary.exchanges.look_up import round_leg
from armillary.facts.mesh import DATA
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Group
from armillary.planning.leg_seconds import leg_seconds
from armillary.planning.pricing import Case, idle_leg, index_seconds, row_update_seconds, row_work
from armillary.planning.traffic import busiest_share, merged_rows, traffic
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.schedule import Schedule

__all__ = ["NO_TABLES", "TablePlan", "TableRequest", "reduced_bytes", "table_groups"]


class TableRequest(NamedTuple):
    """How a table is to be kept by row."""

    choice: Choice
    is_lazy: bool


NO_TABLES: Mapping[str, TableRequest] = MappingProxyType({})


class TablePlan(NamedTuple):
    """Under what the tables of a stage are planned."""

    stage: int
    options: ScheduleOptions
    schedule: Schedule
    case: Case

    @property
    def stale(self) -> int:
        """Micro-batches that read rows one step old."""
        return sum(ages[self.stage] > 0 for ages in self.schedule.staleness)


def table_groups(under: TablePlan, facts: Sequence[ParameterFact], asked: Mapping[str, TableRequest]) -> list[Group]:
    """The groups of the tables that one stage reads."""
    topology, groups = under.case.topology, []
    for number, fact in enumerate(facts):
        request = asked[fact.name]
        forecast = _forecast(fact, request, under)
        codes = build_row(request.choice.name, **request.choice.options).codes
        if number == 0:  # the round that says what was learnt is one for all of them
            learnt = idle_leg(topology, len(facts))
            forecast += Forecast(learnt.link_bytes, 0.0, leg_seconds([learnt], topology))
        group = Group(
            name=f"stage {under.stage}: {fact.name}",
            parameters=(fact.name,),
            layout="row_sharded",
            exchange=request.choice,
            stage=under.stage,
            departures=("stale",) * (under.stale > 0) + ("lazy",) * request.is_lazy + codes.departs,
            forecast=forecast,
            reason=f"read by stage {under.stage}; {under.stale} of {under.schedule.micro_batches} micro-batches read "
            f"rows one step old",
        )
        groups.append(group)
    return groups


def _forecast(fact: ParameterFact, request: TableRequest, under: TablePlan) -> Forecast:
    """Bytes are the mean over workers, memory is the fullest one's."""
    choice, options, case = request.choice, under.options, under.case
    topology, rows = case.topology, fact.rows
    assert rows is not None, fact
    work = row_work(fact, choice, request.is_lazy, case)
    all_read = options.method.axis == DATA  # else only the worker of that stage
    readers = topology.workers if all_read else 1
    exchange = build_row(choice.name, **choice.options)
    owned = exchange.ownership(rows.rows, RankInfo(0, topology.workers, topology.workers_per_node))
    moved = traffic(rows, case.profile, topology)._replace(item_bytes=fact.bytes // fact.elements)
    if not all_read:
        own = len(owned.owners) > 0 and under.stage in owned.owners
        moved = moved._replace(away=1 - own / len(owned.owners))
    skew = busiest_share(rows, len(owned.owners), owned.order) * len(owned.owners)
    busy, even = exchange.legs(moved, skew, topology), exchange.legs(moved, 1.0, topology)
    times, header = options.micro_batches, round_leg(moved.lookups, topology)
    sent = times * (header.link_bytes + _bytes([*even.pull, *even.push]) * readers / topology.workers)
    links = times * leg_seconds([header, *busy.pull, *busy.push], topology)
    seconds = links + times * index_seconds(work, case) + row_update_seconds(work, case)
    touched = merged_rows(rows, case.profile, readers * times) / len(owned.owners) * rows.row_bytes
    in_step = touched if work.has_window else work.copy_bytes  # what a step may change
    kept = 1 + work.slots
    memory = kept * work.copy_bytes + in_step * (1 + (under.stale > 0)) + kept * touched * work.has_window
    return Forecast(sent, memory, seconds)


def _bytes(legs: Iterable[Leg]) -> float:
    return sum(leg.link_bytes for leg in legs)


def reduced_bytes(facts: Iterable[ParameterFact]) -> int:
    """Of gradients that are added up over ranks, with a count for every parameter."""
    return sum(fact.bytes + fact.bytes // max(1, fact.elements) for fact in facts)
