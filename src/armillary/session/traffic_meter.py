"""What this rank sent and how long it took, by the groups of a plan and the edges of its schedule.

A plan charges the first group of a stage with all that the stage passes on. So bytes of an edge are a part of that
group's, and are shown apart. `everyones_trace` joins the last steps of all ranks into one trace.
"""

import re
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from armillary.exchanges.exchange import build_dense
from armillary.planning.stage_costs import charged_to
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.plans.trace import Record, Trace
from armillary.schedules.registry import has_clock
from armillary.transport.point_to_point import FORM, LENGTH, LENGTHS
from armillary.transport.transport import Transport

__all__ = [
    "MANY_RECORDS",
    "MOST_RECORDS",
    "OTHER",
    "STEP",
    "EdgeLabels",
    "TrafficMeter",
    "everyones_trace",
    "usual_seconds",
    "way_of",
]

STEP = "step"  # the whole of it
TIMED_STEPS = 1000
MANY_RECORDS = 4096  # a transport's that are added up in between
OTHER = "other requests"  # rounds of look-ups, gradient norms: what belongs to no group


def usual_seconds(steps: Sequence[float], period: int = 1) -> float:
    """Of a step, from the seconds of consecutive ones: the median over the last whole periods of their means; of all
    together where none is whole. 0 of none."""
    size = min(period, len(steps))
    ends = range(len(steps), size - 1, -size) if size else ()
    return median(sum(steps[end - size : end]) / size for end in ends) if size else 0.0


def _period_of(plan: Plan) -> int:
    """Steps after which all happens again: more than 1 where a group is not pushed in every step."""
    seldom = [group.own_exchange for group in plan.groups if group.cadence == "meeting"]
    periods = [build_dense(one.name, **one.options).period for one in seldom]
    return min(max(periods, default=1), TIMED_STEPS)


@dataclass(frozen=True)
class _Told:
    """What a tally had counted when it was asked for metrics."""

    steps: int = 0
    at_seconds: float = field(default_factory=time.perf_counter)
    sent: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class TrafficMeter:
    """Adds up the records of this rank by group. records: those of the last `window` steps, or of two whole periods,
    for the trace."""

    def __init__(self, plan: Plan, window: int = 50):
        self.period = _period_of(plan)
        window = window if self.period == 1 else max(window, 2 * self.period + 1)
        self.groups = {group.name for group in plan.groups}
        self.group_of = {name: group.name for group in plan.groups for name in group.parameters}
        self.window = window
        self.sent: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.records: list[Record] = []
        self.step_records: deque[Record] = deque(maxlen=window)
        self.steps, self.is_timed = 0, has_clock(plan.schedule)
        self._ended: deque[float] = deque(maxlen=TIMED_STEPS + 1)  # when the last steps were over
        self.sent_bytes = 0.0  # by this rank, in all
        self._told = _Told()

    def add(self, records: tuple[Record, ...]) -> None:
        """Takes more records; whoever steps says so by `end_step`."""
        for record in records:
            group = self._group(record.group)
            self.sent[group] += record.sent_bytes
            self.seconds[group] += record.seconds
            self.sent_bytes += record.sent_bytes
        self.keep(records)

    def keep(self, records: tuple[Record, ...]) -> None:
        """For the trace; they are counted elsewhere."""
        last = records[-1].step if records else 0
        kept = [record for record in (*self.records, *records) if record.step > last - self.window]
        self.records = kept

    def end_step(self) -> None:
        """A step is over."""
        self.steps += 1
        self._ended.append(time.perf_counter())

    @property
    def step_seconds(self) -> float:
        """From the end of a step to that of the next, the median of the last ones: an evaluation between two steps
        does not show. The mean over a period, where there was a whole one. 0 of fewer than two steps."""
        return usual_seconds([after - before for before, after in pairwise(self._ended)], self.period)

    def add_step(self, step: int, start_seconds: float, seconds: float) -> None:
        """For the trace; seconds since the transport's origin."""
        self.step_records.append(Record(step, STEP, "from batch to update", start_seconds, seconds, 0.0))

    def put(self, group: str, sent_bytes: float, seconds: float) -> None:
        """Counted elsewhere."""
        self.sent[group] += sent_bytes
        self.seconds[group] += seconds
        self.sent_bytes += sent_bytes

    def _group(self, label: str) -> str:
        """Pulls are recorded under the table's name, pushes under the group's."""
        return label if label in self.groups else self.group_of.get(label, OTHER)

    def per_step(self) -> dict[str, tuple[float, float]]:
        """group -> (bytes sent, seconds in flight), means over the steps."""
        steps = max(self.steps, 1)
        return {group: (self.sent[group] / steps, self.seconds[group] / steps) for group in self.sent}

    def metrics(self) -> dict[str, float]:
        """Means per step over the steps since the last call; empty if there was none. Seconds of a group are those its
        requests were in flight, where they are measured."""
        last, now = self._told, _Told(self.steps, sent=dict(self.sent), seconds=dict(self.seconds))
        steps = now.steps - last.steps
        if not steps:
            return {}
        self._told = now
        sent = {name: (value - last.sent.get(name, 0.0)) / steps for name, value in now.sent.items()}
        seconds = now.seconds if self.is_timed else {}
        flown = {name: (value - last.seconds.get(name, 0.0)) / steps for name, value in seconds.items()}
        found = {
            "steps": float(steps),
            "step_seconds": (now.at_seconds - last.at_seconds) / steps,
            "sent_bytes": sum(sent.values()),
        }
        if self.is_timed:
            found["in_flight_seconds"] = sum(flown.values())
        found |= {f"sent_bytes/{name}": value for name, value in sent.items()}
        return found | {f"in_flight_seconds/{name}": value for name, value in flown.items()}


UNPLANNED = "buffers"  # no forecast has them
_EDGE = re.compile(rf"(?:{LENGTHS})?(?P<edge>(?!{UNPLANNED}|{LENGTH}|{FORM})[a-z' ]+ of stage (?P<stage>\d+))")


def way_of(plan: Plan, group: Group) -> str:
    """How a group travels, in words of the plan: by its exchange, or by the schedule's own messages."""
    return plan.schedule.name if group.exchange is None else str(group.exchange)


class EdgeLabels:
    """Of a plan's schedule; `StageMessage.edge` is the name of one."""

    def __init__(self, plan: Plan) -> None:
        first = {group.stage: group.name for group in reversed(plan.groups)}
        holding = sorted(first)
        self._charged = {stage: first[charged_to(stage, holding)] for stage in range(len(plan.stages) or 1) if holding}
        self._groups = {group.name for group in plan.groups}

    def edge_of(self, label: str) -> str | None:
        """None: of no edge. Forms, which the first message of an edge brings along, are of none."""
        found = _EDGE.fullmatch(label)
        return found["edge"] if found else None

    @staticmethod
    def order(edge: str) -> tuple[int, str]:
        """Edges by the stage that made what crosses, whenever it does."""
        found = _EDGE.fullmatch(edge)
        return (int(found["stage"]), edge) if found else (0, edge)

    def group_of(self, label: str) -> str:
        """Of a request or message under that label."""
        if found := _EDGE.fullmatch(label):
            return self._charged[int(found["stage"])]
        return label if label in self._groups else OTHER


MOST_RECORDS = 100_000  # a viewer opens so many, of all ranks together


def everyones_trace(mine: Sequence[Record], transport: Transport) -> Trace:
    """Collective. Seconds count from the first record of any rank, by the machines' clocks.

    Args:
        mine: of this rank; of the last steps as many are kept as there is room for, one at least.
    """
    since_epoch = time.time() - time.perf_counter() + transport.origin_seconds
    room = MOST_RECORDS // transport.place.workers
    first = max((record.step for record in mine[:-room]), default=-1) + 1
    first = min(first, max((record.step for record in mine), default=0))
    placed = [replace(r, start_seconds=since_epoch + r.start_seconds) for r in mine if r.step >= first]
    everyones = transport.share(sorted(placed, key=lambda record: record.start_seconds))
    origin = min((records[0].start_seconds for records in everyones if records), default=0.0)
    return Trace(
        tuple(
            tuple(replace(record, start_seconds=record.start_seconds - origin) for record in records)
            for records in everyones
        )
    )
