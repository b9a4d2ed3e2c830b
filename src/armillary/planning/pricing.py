"""Seconds, bytes and memory of one group under one choice, over the links of a topology.

Seconds are those of the links, as the exchange itself says what passes them, plus the work of the busiest rank's
processor and memory: everything the group adds to a step when nothing is hidden behind compute. Bytes are the mean over
workers, by the exchange's own formula; memory is what the fullest worker holds.

Source: Parallax's table of transfers (Kim et al., EuroSys 2019). Departure: index work is priced.
"""

import math
from dataclasses import dataclass

from armillary.exchanges.exchange import Place, build_dense, build_row
from armillary.exchanges.look_up import FLAGS, round_leg
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Update
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.leg_seconds import leg_seconds
from armillary.planning.traffic import busiest_share, merged_rows, traffic, traffic_merged

__all__ = ["ADAGRAD", "ADAM", "SGD", "Assumptions", "Case", "dense_forecast", "idle_round", "row_forecast"]


@dataclass(frozen=True)
class Assumptions:
    """What pricing takes for granted about the optimizer and the processor of a rank. Measured values are better.

    Args of note:
        optimizer_slots: tensors of optimizer state per parameter: 0 SGD, 1 momentum or Adagrad, 2 Adam.
        moves_quiet_rows: whether the optimizer moves rows that got no gradient (momentum, Adam, weight decay). If
            so, an exact table keeps a gradient of all its rows; if not, only of the touched ones.
        row_seconds: index work (unique, gather, segment sum) per row asked for or served. The default is a round
            figure for one CPU core and rows of about a kilobyte.
        memory_bytes_per_second: at which a rank fills, copies and updates whole tensors; a round figure likewise.
    """

    optimizer_slots: int = 2
    moves_quiet_rows: bool = True
    row_seconds: float = 1e-6
    memory_bytes_per_second: float = 5e9

    def __post_init__(self) -> None:
        if self.optimizer_slots < 0 or self.row_seconds < 0 or self.memory_bytes_per_second <= 0:
            raise ValueError(
                "pricing: want optimizer_slots >= 0, row_seconds >= 0, memory_bytes_per_second > 0, got "
                f"{self.optimizer_slots}, {self.row_seconds}, {self.memory_bytes_per_second}"
            )


SGD = Assumptions(optimizer_slots=0, moves_quiet_rows=False)
ADAGRAD = Assumptions(optimizer_slots=1, moves_quiet_rows=False)
ADAM = Assumptions(optimizer_slots=2, moves_quiet_rows=True)


@dataclass(frozen=True)
class Case:
    """What is priced: a model, the machines, and what is taken for granted."""

    profile: Profile
    topology: Topology
    assumptions: Assumptions = ADAM


def dense_forecast(nbytes: int, choice: Choice, case: Case, buckets: float = 1.0) -> Forecast:
    """One bucket of `nbytes`. A part of a bucket pays for a part of its latency: `buckets` < 1."""
    slots, exchange = case.assumptions.optimizer_slots, build_dense(choice.name, **choice.options)
    sent = exchange.sent_bytes(nbytes, case.topology)
    # Into the bucket (read, write); the update reads gradient, reads and writes weight and state.
    touched_bytes = (2 + 3 + 2 * slots) * nbytes
    links = leg_seconds(exchange.legs(nbytes, case.topology), case.topology, buckets)
    return Forecast(sum(sent) / len(sent), (2 + slots) * nbytes, links + _memory_seconds(touched_bytes, case))


def row_forecast(fact: ParameterFact, choice: Choice, update: Update, case: Case) -> Forecast:
    """One table that is read by row. The round in which ranks say they are idle is not in it (`idle_round`)."""
    assert fact.rows is not None, fact
    rows, topology = fact.rows, case.topology
    exchange = build_row(choice.name, **choice.options)
    owned = exchange.ownership(rows.rows, Place(0, topology.workers, topology.workers_per_node))
    owners = len(owned.owners)
    if exchange.placement == "row_sharded":
        moved = traffic(rows, case.profile, topology)
        skew = busiest_share(rows, owners, owned.order) * topology.workers
        headers = [round_leg(moved.lookups, topology)]
        handled = moved.distinct_rows * (1 + skew)  # asked for and served
    else:
        moved, skew, headers = traffic_merged(rows, case.profile, topology), 1.0, []
        handled = moved.distinct_rows * topology.workers
    legs = exchange.legs(moved, skew, topology)
    links = leg_seconds([*headers, *legs.pull, *legs.push], topology)
    copy_bytes = owned.capacity * rows.row_bytes
    touched_bytes = merged_rows(rows, case.profile, topology.workers) / owners * rows.row_bytes
    has_window = update == "lazy" or not case.assumptions.moves_quiet_rows
    return Forecast(
        exchange.sent_bytes(moved, topology) + sum(leg.link_bytes for leg in headers),
        _row_memory(copy_bytes, touched_bytes, has_window, case),
        links + handled * case.assumptions.row_seconds + _row_update_seconds(copy_bytes, has_window, case),
    )


def _row_memory(copy_bytes: float, touched_bytes: float, has_window: bool, case: Case) -> float:
    """Weight, state and gradient of the rows a worker holds; a window holds touched rows of all three once more."""
    slots = case.assumptions.optimizer_slots
    return (1 + slots) * copy_bytes + ((2 + slots) * touched_bytes if has_window else copy_bytes)


def _row_update_seconds(copy_bytes: float, has_window: bool, case: Case) -> float:
    """The gradient of all rows is filled, then the update passes over all of them; a window's rows are index work."""
    return 0.0 if has_window else _memory_seconds((1 + 3 + 2 * case.assumptions.optimizer_slots) * copy_bytes, case)


def _memory_seconds(touched_bytes: float, case: Case) -> float:
    return touched_bytes / case.assumptions.memory_bytes_per_second


def idle_round(topology: Topology, tables: int = 1) -> Forecast:
    """The round that ends a step's look-ups, if there are row-sharded tables; more than one where these are many."""
    header = round_leg(math.ceil(tables / FLAGS), topology)
    return Forecast(header.link_bytes, 0.0, leg_seconds([header], topology))
