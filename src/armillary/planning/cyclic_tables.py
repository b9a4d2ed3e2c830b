"""What a cyclic plan says of the tables it keeps by row, and of ranks that carry a schedule out side by side.

A table goes by row only where the user asks for it. Every micro-batch pulls its rows, so bytes are those of one look-up
times the micro-batches; in a pipeline one process reads and all serve. A push a step takes the gradients back, after
one more round in which ranks say from which tables they learnt. An owner keeps, of a stale table, what the last step
changed: the touched rows where the optimizer leaves the others alone, else its whole shard.

Source: Kim et al., EuroSys 2019; Fournier & Oyallon, 2024.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from armillary.exchanges.exchange import Place, build_row
from armillary.exchanges.leg import Leg
from armillary.exchanges.look_up import round_leg
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Group, Update
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint, names_of, placement_of, resolve
from armillary.planning.leg_seconds import leg_seconds
from armillary.planning.parallax import plain
from armillary.planning.pricing import Case, idle_leg, index_seconds, row_update_seconds, row_work
from armillary.planning.traffic import busiest_share, merged_rows, traffic
from armillary.schedules.cyclic_modes import CyclicOptions
from armillary.schedules.schedule import Schedule

__all__ = ["NO_TABLES", "Wish", "table_groups", "team_notes", "team_traffic", "wished_tables"]


class Wish(NamedTuple):
    """How a table is to be kept by row."""

    choice: Choice
    is_lazy: bool


NO_TABLES: Mapping[str, Wish] = MappingProxyType({})


def wished_tables(case: Case, constraints: Mapping[str, Constraint], lazy: Iterable[str]) -> dict[str, Wish]:
    """
    Raises:
        ValueError: a constraint names no table, or asks for something else than rows with an owner; or a lazy table
            that is not kept by row.
    """
    quiet = names_of(lazy, case.profile)
    found = {}
    for name, demanded in resolve(constraints, case.profile, case.topology).items():
        choice = plain(demanded) if isinstance(demanded, str) else demanded
        if placement_of(choice) != "row_sharded":
            raise ValueError(
                f"plan: {name!r} is to be {demanded}; a cyclic schedule says itself how whole parameters travel, and a "
                f"constraint can only ask for rows with owners: 'row_sharded'. Drop it"
            )
        found[name] = Wish(choice, name in quiet)
    if whole := sorted(quiet - found.keys()):
        raise ValueError(
            f"plan: {', '.join(whole)} can be lazy under a cyclic schedule only if kept by row: add the constraint "
            f"'row_sharded', or drop lazy"
        )
    return found


def table_groups(
    stage: int,
    facts: Sequence[ParameterFact],
    wished: Mapping[str, Wish],
    under: tuple[CyclicOptions, Schedule, Case],
) -> list[Group]:
    """The groups of the tables that one stage reads. under: what is planned."""
    options, schedule, case = under
    old = sum(ages[stage] > 0 for ages in schedule.staleness)
    groups = []
    for number, fact in enumerate(facts):
        wish = wished[fact.name]
        update: Update = "stale" if old else "exact"
        if wish.is_lazy:
            update = "stale_lazy" if old else "lazy"
        reason = f"read by stage {stage}; {old} of {schedule.micro_batches} micro-batches read rows one step old"
        forecast = _forecast(fact, wish.choice, update, (options, case), bool(old), stage)
        if number == 0:  # the round that says what was learnt is one for all of them
            learnt = idle_leg(case.topology, len(facts))
            forecast += Forecast(learnt.link_bytes, 0.0, leg_seconds([learnt], case.topology))
        name = f"stage {stage}: {fact.name}"
        groups.append(Group(name, (fact.name,), "row_sharded", wish.choice, update, forecast, reason))
    return groups


def _forecast(
    fact: ParameterFact, choice: Choice, update: Update, under: tuple[CyclicOptions, Case], is_stale: bool, stage: int
) -> Forecast:
    """Bytes are the mean over workers, memory is the fullest one's."""
    options, case = under
    topology, slots, rows = case.topology, case.assumptions.optimizer_slots, fact.rows
    assert rows is not None, fact
    work = row_work(fact, choice, update, case)
    readers = topology.workers if options.mode == "one_device" else 1
    exchange = build_row(choice.name, **choice.options)
    owned = exchange.ownership(rows.rows, Place(0, topology.workers, topology.workers_per_node))
    moved = traffic(rows, case.profile, topology)
    if options.mode == "pipeline":  # only that stage's worker reads
        own = len(owned.owners) > 0 and stage in owned.owners
        moved = moved._replace(away=1 - own / len(owned.owners))
    skew = busiest_share(rows, len(owned.owners), owned.order) * len(owned.owners)
    busy, even = exchange.legs(moved, skew, topology), exchange.legs(moved, 1.0, topology)
    times, header = options.micro_batches, round_leg(moved.lookups, topology)
    sent = times * (header.link_bytes + _bytes([*even.pull, *even.push]) * readers / topology.workers)
    links = times * leg_seconds([header, *busy.pull, *busy.push], topology)
    seconds = links + times * index_seconds(work, case) + row_update_seconds(work, case)
    touched = merged_rows(rows, case.profile, readers * times) / len(owned.owners) * rows.row_bytes
    in_step = touched if work.has_window else work.copy_bytes  # what a step may change
    memory = (1 + slots) * work.copy_bytes + in_step * (1 + is_stale) + (1 + slots) * touched * work.has_window
    return Forecast(sent, memory, seconds)


def _bytes(legs: Iterable[Leg]) -> float:
    return sum(leg.link_bytes for leg in legs)


def team_traffic(nbytes: int, topology: Topology) -> tuple[float, float]:
    """Bytes per worker, and seconds, of averaging a stage's gradients over ranks that work side by side."""
    workers = topology.workers
    sent = 2 * (workers - 1) / workers * nbytes
    return sent, topology.link.seconds(sent, 2 * (workers - 1)) if workers > 1 else 0.0


def team_notes(options: CyclicOptions, workers: int) -> tuple[str, ...]:
    if options.mode != "one_device" or workers == 1:
        return ()
    return (
        f"{workers} processes, each with {options.micro_batches} micro-batches of its own a step: a stage's gradients "
        f"are averaged over them when they are complete, and nothing hides that",
    )
