"""Seconds, bytes and memory of one group under one choice, over the links of a topology.

Seconds are latency + bytes / bandwidth at the rank whose link is busiest, plus the work on its own processor and
memory: everything the group adds to a step when nothing is hidden behind compute (hiding is the simulator's business).
Bytes are the mean over workers, by the exchange's own formula; memory is what the fullest worker holds.

Source: Thakur, Rabenseifner and Gropp (2005) for the ring; parallax.md's table of transfers is Parallax's (Kim et al.,
EuroSys 2019). Departures: index work is priced; an all-to-all posts all its pieces at once, so it waits for one
latency, not for N - 1.
"""

from dataclasses import dataclass

from armillary.exchanges.exchange import RowTraffic, build_dense, build_row
from armillary.exchanges.look_up import HEADER_BYTES
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Update
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.traffic import busiest_share, merged_rows, traffic, traffic_merged

__all__ = ["ADAGRAD", "ADAM", "SGD", "Assumptions", "Case", "dense_forecast", "idle_round", "owners_of", "row_forecast"]


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
    topology, slots = case.topology, case.assumptions.optimizer_slots
    sent = build_dense(choice.name, **choice.options).sent_bytes(nbytes, topology)
    # Into the bucket (read, write); the update reads gradient, reads and writes weight and state.
    touched_bytes = (2 + 3 + 2 * slots) * nbytes
    return Forecast(
        sum(sent) / len(sent),
        (2 + slots) * nbytes,
        _dense_link_seconds(nbytes, max(sent), choice, topology, buckets) + _memory_seconds(touched_bytes, case),
    )


def _dense_link_seconds(nbytes: int, hottest: float, choice: Choice, topology: Topology, buckets: float) -> float:
    if topology.workers == 1:
        return 0.0
    if choice.name == "all_reduce":
        latency = buckets * 2 * (topology.workers - 1) * topology.link.latency_seconds
        return latency + hottest / topology.link.bytes_per_second
    if choice.options.get("local_aggregation"):
        inside = topology.inside.seconds((topology.workers_per_node - 1) * nbytes)
        return 2 * (inside + topology.between.seconds((topology.nodes - 1) * nbytes))
    # An owner's link is busy twice: it receives everyone's tensor, then it sends the answers.
    return topology.link.seconds(2 * hottest, 2)


def row_forecast(fact: ParameterFact, choice: Choice, update: Update, case: Case) -> Forecast:
    """One table that is read by row. The round in which ranks say they are idle is not in it (`idle_round`)."""
    assert fact.rows is not None, fact
    rows, topology = fact.rows, case.topology
    exchange = build_row(choice.name, **choice.options)
    is_pulled = exchange.placement == "row_sharded"
    moved = (traffic if is_pulled else traffic_merged)(rows, case.profile, topology)
    owners = owners_of(choice, topology) if is_pulled else 1
    union = merged_rows(rows, case.profile, topology.workers)
    copy_bytes = -(-rows.rows // owners) * rows.row_bytes
    has_window = update == "lazy" or not case.assumptions.moves_quiet_rows
    headers = moved.lookups * HEADER_BYTES * (topology.workers - 1) if is_pulled else 0
    if is_pulled:
        share = busiest_share(rows, owners, choice.options.get("order", "modulo"))
        links = _pulled_link_seconds(choice, moved, share, topology)
        handled = moved.distinct_rows + moved.distinct_rows * topology.workers * share
    else:
        links = _gathered_link_seconds(exchange.sent_bytes(moved, topology), topology)
        handled = moved.distinct_rows * topology.workers
    return Forecast(
        exchange.sent_bytes(moved, topology) + headers,
        _row_memory(copy_bytes, union / owners * rows.row_bytes, has_window, case),
        links + handled * case.assumptions.row_seconds + _row_update_seconds(copy_bytes, has_window, case),
    )


def owners_of(choice: Choice, topology: Topology) -> int:
    """Over how many workers a row-sharded choice splits a table."""
    return int(choice.options.get("owners", 0)) or topology.workers


def _row_memory(copy_bytes: float, touched_bytes: float, has_window: bool, case: Case) -> float:
    """Weight, state and gradient of the rows a worker holds; a window holds touched rows of all three once more."""
    slots = case.assumptions.optimizer_slots
    return (1 + slots) * copy_bytes + ((2 + slots) * touched_bytes if has_window else copy_bytes)


def _row_update_seconds(copy_bytes: float, has_window: bool, case: Case) -> float:
    """The gradient of all rows is filled, then the update passes over all of them; a window's rows are index work."""
    return 0.0 if has_window else _memory_seconds((1 + 3 + 2 * case.assumptions.optimizer_slots) * copy_bytes, case)


def _memory_seconds(touched_bytes: float, case: Case) -> float:
    return touched_bytes / case.assumptions.memory_bytes_per_second


def _pulled_link_seconds(choice: Choice, moved: RowTraffic, share: float, topology: Topology) -> float:
    """Header, ids, rows per look-up, and one push. The busiest owner's link carries what the others ask of it."""
    if topology.workers == 1:
        return 0.0
    header = moved.lookups * HEADER_BYTES * (topology.workers - 1)
    if choice.name != "owned_rows_by_node":
        mean_bytes = build_row(choice.name, **choice.options).sent_bytes(moved, topology)
        return _all_to_all(header + mean_bytes * share * topology.workers, 3 * moved.lookups + 1, topology)
    # Two hops, each with counts, ids and rows per look-up and one push; either is the exchange of a smaller house.
    exchange = build_row(choice.name, **choice.options)
    nodes, here = topology.nodes, topology.workers_per_node
    near = Topology(1, here, topology.inside, topology.inside, topology.memory_bytes)
    far = Topology(nodes, 1, topology.between, topology.between, topology.memory_bytes)
    rail = moved._replace(distinct_rows=0.0, node_rows=moved.node_rows / here)
    messages, skew = 3 * moved.lookups + 1, share * topology.workers
    inside = _all_to_all(skew * exchange.sent_bytes(moved, near), messages, near)
    between = _all_to_all(skew * exchange.sent_bytes(rail, far), messages, far)
    return _all_to_all(header, moved.lookups, topology) + inside + between


def _gathered_link_seconds(sent_bytes: float, topology: Topology) -> float:
    """Counts go round by all-gather (N - 1 hops), then ids and rows at once."""
    return _all_to_all(sent_bytes, topology.workers - 1 + 2, topology) if topology.workers > 1 else 0.0


def _all_to_all(hottest_bytes: float, messages: int, topology: Topology) -> float:
    """Even pieces to all others; those inside the node and those between nodes leave by different links, at once."""
    if topology.workers == 1:
        return 0.0
    inside_share = (topology.workers_per_node - 1) / (topology.workers - 1)
    seconds = []
    if topology.workers_per_node > 1:
        seconds.append(topology.inside.seconds(hottest_bytes * inside_share, messages))
    if topology.nodes > 1:
        seconds.append(topology.between.seconds(hottest_bytes * (1 - inside_share), messages))
    return max(seconds)


def idle_round(topology: Topology) -> Forecast:
    """The round that ends a step's look-ups: once a step, if any table is row-sharded."""
    sent_bytes = float(HEADER_BYTES * (topology.workers - 1))
    return Forecast(sent_bytes, 0.0, _all_to_all(sent_bytes, 1, topology))
