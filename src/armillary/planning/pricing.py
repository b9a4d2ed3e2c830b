"""Seconds, bytes and memory of one group under one choice, over the links of a topology.

Seconds are those of the links, as the exchange itself says what passes them, plus the work of the busiest rank's
processor and memory: everything the group adds to a step when nothing is hidden behind compute. Bytes are the mean over
workers, by the exchange's own formula; memory is what the fullest worker holds.

Source: Parallax's table of transfers (Kim et al., EuroSys 2019). Departure: index work is priced.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from armillary.exchanges.averaged_gradients import crossings, packed_share
from armillary.exchanges.dense import DenseExchange, Leg, Legs
from armillary.exchanges.exchange import build_dense, build_row
from armillary.exchanges.look_up import FLAGS, announcement_bytes, round_leg
from armillary.planning.link_costs import (
    Shares,
    Upkeep,
    busiest_share,
    leg_seconds,
    merged_rows,
    prefetched_legs,
    traffic,
    traffic_merged,
)
from armillary.plans.group import Forecast, PrefetchKind
from armillary.plans.parcel import Layout, RankInfo, layout_of
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact, Profile
from armillary.plans.registry import Choice
from armillary.plans.topology import CodingRate, Topology

__all__ = [
    "ADAGRAD",
    "ADAM",
    "SGD",
    "Assumptions",
    "Case",
    "RowWork",
    "assumptions_behind",
    "coding_seconds",
    "dense_forecast",
    "dense_update_seconds",
    "fill_seconds",
    "idle_leg",
    "idle_round",
    "index_seconds",
    "landing_seconds",
    "pack_seconds",
    "predict_seconds_of",
    "row_forecast",
    "row_update_seconds",
    "row_work",
]  # fmt: skip


KEY_BYTES = 8
TIMED_ITEM_BYTES = 4  # of the values with which exchanges are timed
UNSAID = ("mixes_rows", "lists_rows", "stays_whole", "own")  # of assumptions, where they are empty


@dataclass(frozen=True)
class Assumptions:
    """What pricing takes for granted about the optimizer and the processor of a rank. Measured values are better.

    Args of note:
        optimizer_slots: tensors of optimizer state per parameter: 0 SGD, 1 momentum or Adagrad, 2 Adam.
        moves_quiet_rows: whether the optimizer moves rows that got no gradient (momentum, Adam, weight decay). If
            so, an exact table keeps a gradient of all its rows; if not, only of the touched ones.
        step_slots: temporary tensors of a parameter's size that its step needs.
        row_seconds: index work (unique, gather, segment sum) per row asked for or served. The default is a round
            figure for one CPU core and rows of about a kilobyte.
        memory_bytes_per_second: at which a rank fills, copies and updates whole tensors; a round figure likewise.
        mixes_rows: why rows cannot be stepped apart, in words; empty where they can.
        stays_whole: why no row exchange can carry it, in words; empty where one can.
        lists_rows: whether it takes only gradients that list their rows, and moves no others (SparseAdam).
        own: parameter -> what its optimizer keeps and does, where that is not as the others say.
    """

    optimizer_slots: int = 2
    moves_quiet_rows: bool = True
    row_seconds: float = 1e-6
    memory_bytes_per_second: float = 5e9
    step_slots: float = 0.0
    mixes_rows: str = ""
    lists_rows: bool = False
    stays_whole: str = ""
    own: Mapping[str, Upkeep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = min(self.optimizer_slots, self.row_seconds, self.step_slots)
        if least < 0 or self.memory_bytes_per_second <= 0:
            raise ValueError(
                "pricing: want optimizer_slots, row_seconds and step_slots >= 0, memory_bytes_per_second > 0, got "
                f"{self.optimizer_slots}, {self.row_seconds}, {self.step_slots}, {self.memory_bytes_per_second}"
            )

    def of(self, parameter: str) -> Upkeep:
        found = self.own.get(parameter)
        return found or Upkeep(**{one.name: getattr(self, one.name) for one in fields(Upkeep)})

    def as_fields(self) -> dict[str, Any]:
        """As `Plan.priced_with` has them."""
        return {name: one for name, one in asdict(self).items() if one or name not in UNSAID}


def assumptions_behind(plan: Plan) -> Assumptions:
    """What the plan was priced with.

    Raises:
        ValueError: nobody priced it.
    """
    if not plan.priced_with:
        raise ValueError("plan: it does not say what optimizer it was priced for; plan again")
    taken = dict(plan.priced_with)
    slots, moves = int(taken.pop("optimizer_slots")), bool(taken.pop("moves_quiet_rows"))
    own = {name: Upkeep(**one) for name, one in taken.pop("own", {}).items()}
    return Assumptions(slots, moves, own=own, **taken)


SGD = Assumptions(optimizer_slots=0, moves_quiet_rows=False)
ADAGRAD = Assumptions(optimizer_slots=1, moves_quiet_rows=False)
ADAM = Assumptions(optimizer_slots=2, moves_quiet_rows=True)


@dataclass(frozen=True)
class Case:
    """What is priced: a model, the machines, and what is taken for granted where it was not measured."""

    profile: Profile
    topology: Topology
    assumptions: Assumptions = ADAM

    @property
    def memory_bytes_per_second(self) -> float:
        measured = self.topology.processor
        return self.assumptions.memory_bytes_per_second if measured is None else measured.memory_bytes_per_second

    def against(self, parameter: str, is_spread: bool) -> str:
        """Why its optimizer cannot have it exchanged by row, or spread by row; empty where it can."""
        upkeep = self.assumptions.of(parameter)
        return upkeep.stays_whole or (upkeep.mixes_rows if is_spread else "")

    def by_slots(self, facts: Iterable[ParameterFact]) -> dict[int, list[ParameterFact]]:
        """The same parameters, by how many tensors of state the optimizer keeps of each."""
        found: dict[int, list[ParameterFact]] = {}
        for fact in facts:
            found.setdefault(self.assumptions.of(fact.name).optimizer_slots, []).append(fact)
        return found

    def slots_of(self, facts: Sequence[ParameterFact]) -> float:
        """Tensors of optimizer state per parameter, in the mean over their bytes."""
        found = self.by_slots(facts)
        if len(found) < 2:
            return next(iter(found), self.assumptions.optimizer_slots)
        return sum(slots * _bytes_of(those) for slots, those in found.items()) / max(1, _bytes_of(facts))

    def coding_rate(self, choice: Choice) -> CodingRate | None:
        """As it was timed with these options; else of the exchange with any."""
        timed = self.topology.processor.coding if self.topology.processor else ()
        found = {rate.exchange: rate for rate in timed if Choice.parse(rate.exchange).name == choice.name}
        return found.get(str(choice)) or next(iter(found.values()), None)

    def row_seconds(self, row_bytes: int) -> float:
        """Index work per row of that size."""
        measured = self.topology.processor
        if measured is None:
            return self.assumptions.row_seconds
        return sum(kind.row_seconds + row_bytes * kind.byte_seconds for kind in measured.kinds)

    @property
    def call_seconds(self) -> float:
        """Index work of a table whatever its rows: one call of each kind."""
        measured = self.topology.processor
        return 0.0 if measured is None else sum(rate.call_seconds for rate in measured.kinds)

    @property
    def key_seconds(self) -> float:
        """Equal keys found, per key: what merging costs without the rows, or a third of the index work assumed."""
        measured = self.topology.processor
        if measured is None:
            return self.assumptions.row_seconds / 3
        return measured.merge.row_seconds + KEY_BYTES * measured.merge.byte_seconds


def _bytes_of(facts: Iterable[ParameterFact]) -> int:
    return sum(fact.bytes for fact in facts)


def dense_forecast(facts: Sequence[ParameterFact], choice: Choice, case: Case, buckets: float = 1.0) -> Forecast:
    """One bucket of these parameters, in the mean over steps. A part of a bucket pays for a part of its latency:
    `buckets` < 1."""
    exchange = build_dense(choice.name, **choice.options)
    layout, sent_bytes = layout_of(facts, exchange.align, exchange.is_guarded), 0.0
    seconds = exchange.share_due * coding_seconds(choice, layout, case)
    for one in crossings(exchange):
        sent = one.sent_bytes(layout, case.topology)
        sent_bytes += one.share_due * sum(sent) / len(sent)
        seconds += one.share_due * leg_seconds(one.legs(layout, case.topology), case.topology, buckets)
    nbytes = layout.joined_bytes
    seconds += pack_seconds(nbytes * packed_share(exchange), facts, case) + dense_update_seconds(nbytes, facts, case)
    copies = 2 + case.slots_of(facts) + (exchange.carries == "weights")  # weights are not sent from where they are
    memory = copies * nbytes + exchange.state_bytes(layout, case.topology.workers)
    return Forecast(sent_bytes, memory, seconds)


def coding_seconds(choice: Choice, layout: Layout, case: Case) -> float:
    """What an exchange makes of the numbers of one push, besides packing them: as it was timed here with these options,
    or others of them, on so many workers; else its work at the memory speed that is taken for granted, since it was
    counted at that."""
    work, rate = _exchange_of(choice).work(layout, case.topology), case.coding_rate(choice)
    if not work or rate is None:
        return work * layout.item_bytes / case.assumptions.memory_bytes_per_second
    timed = _exchange_of(Choice.parse(rate.exchange)).work(layout, case.topology.of_one_node(rate.workers))
    millions = layout.numel / 1e6 * layout.item_bytes / TIMED_ITEM_BYTES
    return rate.call_seconds + millions * rate.million_seconds * work / timed


def _exchange_of(choice: Choice) -> DenseExchange:
    return build_dense(choice.name, **choice.options)


def pack_seconds(nbytes: float, facts: Sequence[ParameterFact], case: Case) -> float:
    """Gradients into their bucket: read and written. Those of tables read by row are filled first; stages are timed
    without that (`profiler/stages.py`)."""
    return 2 * nbytes / case.memory_bytes_per_second + fill_seconds(facts, case)


def fill_seconds(facts: Iterable[ParameterFact], case: Case) -> float:
    """One backward's gradients of whole tables among these parameters, written twice: by the kernel, then by torch."""
    return 2 * _bytes_of(fact for fact in facts if fact.shardable) / case.memory_bytes_per_second


def dense_update_seconds(nbytes: int, facts: Sequence[ParameterFact], case: Case) -> float:
    """The update reads gradient, reads and writes weight and state, and calls a few operations on every tensor.
    nbytes: of these parameters together, as they are joined."""
    whole = max(1, _bytes_of(facts))
    shares = {slots: (_bytes_of(those) / whole, len(those)) for slots, those in case.by_slots(facts).items()}
    return sum((_update_seconds(nbytes * share, n, slots, case) for slots, (share, n) in shares.items()), 0.0)


def _update_seconds(nbytes: float, tensors: int, slots: int, case: Case) -> float:
    measured = case.topology.processor
    if measured is None or not measured.updates:
        return (3 + 2 * slots) * nbytes / case.memory_bytes_per_second
    rate = measured.updates[min(slots, len(measured.updates) - 1)]
    return tensors * rate.tensor_seconds + nbytes * rate.byte_seconds


def landing_seconds(facts: Sequence[ParameterFact], case: Case) -> float:
    """One backward's gradients of these parameters, each taken by a schedule and added to a sum, which is read and
    written; and tables are filled."""
    measured = case.topology.processor
    if measured is None or not measured.landing_seconds:
        return fill_seconds(facts, case)
    added = 3 * _bytes_of(facts) / case.memory_bytes_per_second
    return fill_seconds(facts, case) + len(facts) * measured.landing_seconds + added


class RowWork(NamedTuple):
    """What one table asks of a rank in a step.

    Args of note:
        headers: of its look-ups. legs: at the busiest owner. even_legs: at the mean one. ahead, even_ahead: likewise
            of what leaves in another step: ids; of rows that go early, masks and these rows; gradients that wait.
        handled_rows: asked for and served, or gathered. prefetched_rows: looked for once more, to prefetch.
        copy_bytes: of the rows the fullest rank holds; touched_bytes: of those a step updates. slots: tensors of
            optimizer state per row.
        has_window: whether the optimizer sees the touched rows only.
        coded_bytes: that coding rows and their gradients reads and writes.
    """

    headers: tuple[Leg, ...]
    legs: Legs
    even_legs: Legs
    handled_rows: float
    row_bytes: int
    copy_bytes: float
    touched_bytes: float
    slots: int
    has_window: bool
    ahead: tuple[Leg, ...] = ()
    even_ahead: tuple[Leg, ...] = ()
    prefetched_rows: float = 0.0
    coded_bytes: float = 0.0


def row_work(
    fact: ParameterFact,
    choice: Choice,
    is_lazy: bool,
    case: Case,
    prefetch: PrefetchKind = "none",
    pays: bool = True,
) -> RowWork:
    """The rounds in which ranks say they are idle are not in it (`idle_round`).

    Args:
        prefetch: then every look-up is taken to be prefetched. Exchanges that cannot say what goes early are priced as
            without.
        pays: of prefetched look-ups, whether this table pays the latency of messages that all tables share.
    """
    assert fact.rows is not None, fact
    rows, topology, upkeep = fact.rows, case.topology, case.assumptions.of(fact.name)
    exchange = build_row(choice.name, **choice.options)
    owned = exchange.ownership(rows.rows, RankInfo(0, topology.workers, topology.workers_per_node))
    owners = len(owned.owners)
    if exchange.placement == "row_sharded":
        moved = traffic(rows, case.profile, topology)
        skew = busiest_share(rows, owners, owned.order) * topology.workers
        headers: tuple[Leg, ...] = (round_leg(moved.lookups, topology),)
        handled = moved.distinct_rows * (1 + skew)  # asked for and served
    else:
        moved, skew, headers = traffic_merged(rows, case.profile, topology), 1.0, ()
        handled = moved.distinct_rows * topology.workers
    moved = moved._replace(item_bytes=fact.bytes // fact.elements)
    legs, even_legs = (exchange.legs(moved, load, topology) for load in (skew, 1.0))
    ahead: tuple[Leg, ...] = ()
    even_ahead: tuple[Leg, ...] = ()
    prefetched_rows = 0.0
    if prefetch != "none" and exchange.early_legs is not None:
        shares = Shares.of(rows, prefetch, case.profile, topology)
        headers, prefetched_rows = (), handled
        (ahead, legs), (even_ahead, even_legs) = (
            prefetched_legs(exchange, moved, load, shares, pays, topology) for load in (skew, 1.0)
        )
        if shares.resting is not None:  # those served are looked for in the batch after, too
            prefetched_rows += moved.distinct_rows * skew
    return RowWork(
        headers=headers,
        legs=legs,
        even_legs=even_legs,
        ahead=ahead,
        even_ahead=even_ahead,
        prefetched_rows=prefetched_rows,
        handled_rows=handled,
        row_bytes=rows.row_bytes,
        copy_bytes=owned.capacity * rows.row_bytes,
        touched_bytes=merged_rows(rows, case.profile, topology.workers) / owners * rows.row_bytes,
        slots=upkeep.optimizer_slots,
        has_window=is_lazy or not upkeep.moves_quiet_rows,
        coded_bytes=handled * rows.row_bytes * exchange.codes.work / 2,  # one side encodes, the other decodes
    )


def row_forecast(
    fact: ParameterFact,
    choice: Choice,
    is_lazy: bool,
    case: Case,
    prefetch: PrefetchKind = "none",
    pays: bool = True,
) -> Forecast:
    """One table that is read by row, without the idle rounds; `prefetch` and `pays` as in `row_work`."""
    work = row_work(fact, choice, is_lazy, case, prefetch, pays)
    links = leg_seconds([*work.headers, *work.ahead, *work.legs.pull, *work.legs.push], case.topology)
    even = (*work.headers, *work.even_ahead, *work.even_legs.pull, *work.even_legs.push)
    sent = sum(leg.link_bytes for leg in even)
    processor = index_seconds(work, case) + predict_seconds_of(work, case) + row_update_seconds(work, case)
    return Forecast(sent, _row_memory(work), links + processor)


def predict_seconds_of(work: RowWork, case: Case) -> float:
    """Rows that are prefetched are found once more among a batch's ids, and those served among the rows of the batch
    before; and where gradients wait, of the batch after."""
    return work.prefetched_rows * case.key_seconds


def index_seconds(work: RowWork, case: Case) -> float:
    """Every row handled is gathered once, merged once and added once; and coded, where rows are."""
    coding = work.coded_bytes / case.assumptions.memory_bytes_per_second
    return case.call_seconds + work.handled_rows * case.row_seconds(work.row_bytes) + coding


def _row_memory(work: RowWork) -> float:
    """Weight, state and gradient of the rows a worker holds; a window holds touched rows of all three once more."""
    more = (2 + work.slots) * work.touched_bytes if work.has_window else work.copy_bytes
    return (1 + work.slots) * work.copy_bytes + more


def row_update_seconds(work: RowWork, case: Case) -> float:
    """The gradient of all rows is filled, then the update passes over all of them. A window's rows are gathered and put
    back, of weight and state, and the update passes over them; where nobody measured rates, that is index work."""
    measured, passes = case.topology.processor, 3 + 2 * work.slots
    if not work.has_window:
        return (passes + 1) * work.copy_bytes / case.memory_bytes_per_second
    if measured is None:
        return 0.0
    rows = work.touched_bytes / work.row_bytes
    moved = sum(rate.seconds(rows, work.row_bytes) for rate in (measured.gather, measured.add))
    return (1 + work.slots) * moved + passes * work.touched_bytes / case.memory_bytes_per_second


def idle_leg(topology: Topology, tables: int = 1, prefetched: int = 0) -> Leg:
    """The round that ends a step's look-ups, if there are row-sharded tables; more than one where these are many.
    prefetched: how many of them prefetch."""
    return round_leg(math.ceil(tables / FLAGS), topology, announcement_bytes(prefetched))


def idle_round(topology: Topology, tables: int = 1) -> Forecast:
    """What that costs."""
    header = idle_leg(topology, tables)
    return Forecast(header.link_bytes, 0.0, leg_seconds([header], topology))
