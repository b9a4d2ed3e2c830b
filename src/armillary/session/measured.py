"""Seconds in flight and bytes, by group and by edge: expected of a plan, and measured in a trace.

Measured seconds count from when the last rank had asked. Of a group there is the middle half of its steps. Of one that
is not pushed in every step there is the mean over each stretch from one push to the next. A message of an edge is in
flight from when both sides had asked to when one saw that it was over. Each replica is a pipeline of its own, and
seconds are the mean over pipelines.

Expected seconds are those of the plan played against a clock, since they depend on what hides them. Bytes and memory
are the plan's own.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from armillary.exchanges.averaged_gradients import crossings
from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.planning.activities import ALL_REDUCE
from armillary.planning.clock import Simulation
from armillary.planning.group_clock import LOOK_UPS
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.plans.group import Forecast, Group
from armillary.plans.parcel import Layout, layout_of
from armillary.plans.plan import Plan
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.plans.trace import Record, Trace
from armillary.schedules.edges import codes_of
from armillary.schedules.registry import options_of
from armillary.session.traffic_meter import OTHER, STEP, EdgeLabels

__all__ = [
    "MeasuredEdge",
    "MeasuredSeconds",
    "Quartiles",
    "RunForecast",
    "measured_edges",
    "measured_in",
    "run_forecast",
]


@dataclass(frozen=True)
class MeasuredEdge:
    """Of one edge. seconds: by step, added up over its messages. sent_bytes: per worker, of the median step."""

    seconds: dict[str, float]
    sent_bytes: float


@dataclass(eq=False)
class _Letter:
    """Which sides of it are in the trace. starts: when each had asked; ends: when each saw that it was over."""

    starts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    sent_bytes: float = 0.0

    def take(self, one: Record) -> None:
        self.starts[one.action] = min(one.start_seconds, self.starts.get(one.action, one.start_seconds))
        end = one.start_seconds + one.seconds
        self.ends[one.action] = max(end, self.ends.get(one.action, end))
        self.sent_bytes += one.sent_bytes

    @property
    def seconds(self) -> float:
        return max(0.0, min(self.ends.values()) - max(self.starts.values()))


def measured_edges(trace: Trace, plan: Plan) -> dict[str, MeasuredEdge]:
    """By edge, of the plan's schedule."""
    edges, pipelines = EdgeLabels(plan), _pipelines(plan)
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    sent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pipeline in pipelines:
        for (edge, at), message in _messages(edges, (trace.ranks[rank] for rank in pipeline)).items():
            step = at.split(",")[0]
            seconds[edge][step] += message.seconds / len(pipelines)
            sent[edge][step] += message.sent_bytes / plan.workers
    return {edge: MeasuredEdge(dict(spent), median(sent[edge].values())) for edge, spent in seconds.items()}


def _pipelines(plan: Plan) -> Sequence[Sequence[int]]:
    """Ranks that exchange messages: of one replica, or all where each holds the whole model."""
    everybody = list(range(plan.workers))
    pipelines = {tuple(plan.mesh.sharing_data(rank)) for rank in everybody}
    workers = options_of(plan).schedule().workers
    return sorted(pipelines) if all(len(pipeline) == workers for pipeline in pipelines) else [everybody]


def _messages(edges: EdgeLabels, ranks: Iterable[Sequence[Record]]) -> dict[tuple[str, str], _Letter]:
    """By edge and which of it; those of which the trace has both sides."""
    found: defaultdict[tuple[str, str], _Letter] = defaultdict(_Letter)
    for records in ranks:
        for one in records:
            if one.at and (edge := edges.edge_of(one.group)):
                found[edge, one.at].take(one)
    return {key: message for key, message in found.items() if len(message.ends) > 1}


@dataclass(frozen=True)
class RunForecast:
    """By group and by edge, and of the step. decided: where the data decide how much is sent."""

    groups: Mapping[str, Forecast]
    step: Forecast
    edges: Mapping[str, Forecast] = field(default_factory=dict)
    decided: frozenset[str] = frozenset()


def run_forecast(plan: Plan, case: Case, steps: range) -> RunForecast:
    """
    Args:
        case: its topology may be of more workers than the plan. steps: that are looked at, counted from the first.

    Raises:
        ValueError: the plan's schedule is not played, or the profile is of another model.
    """
    case = replace(case, topology=case.topology.of(plan.workers))
    held = {group.name: group.forecast for group in plan.groups}
    played = simulate(plan, case)
    if plan.stages:
        return _by_edge(plan, played)
    sent, flown = _sent_bytes(plan, played) | _bytes_by_push(plan, case, steps), played.in_flight_seconds
    forecast = {name: Forecast(sent[name], one.memory_bytes, flown.get(name, 0.0)) for name, one in held.items()}
    forecast[OTHER] = Forecast(sent[LOOK_UPS], 0.0, flown.get(LOOK_UPS, 0.0))
    step = Forecast(sum(sent.values()), 0.0, played.step_seconds)
    return RunForecast(forecast, step, decided=_decided(plan))


def _by_edge(plan: Plan, played: Simulation) -> RunForecast:
    """Groups as the plan has them, in flight as played; edges as played."""
    names, edges = EdgeLabels(plan), dict[str, Forecast]()
    flown = dict.fromkeys((group.name for group in plan.groups), 0.0)
    for flight in played.flights:
        label = flight.group if flight.action == ALL_REDUCE else f"{flight.action} of {flight.group}"
        name = names.group_of(label)
        flown[name if name in flown else flight.group] += flight.seconds
        if edge := names.edge_of(label):
            edges[edge] = edges.get(edge, Forecast()) + Forecast(flight.sent_bytes, 0.0, flight.seconds)
    groups = {group.name: replace(group.forecast, seconds=flown[group.name]) for group in plan.groups}
    codes = codes_of(options_of(plan).edges)
    decided = frozenset(f"{what} of stage {stage}" for (what, stage), code in codes.items() if not code.is_fixed)
    decided |= {names.group_of(edge) for edge in decided}
    decided |= _decided(plan)
    return RunForecast(groups, Forecast(plan.forecast.sent_bytes, 0.0, played.step_seconds), edges, decided)


def _sent_bytes(plan: Plan, played: Simulation) -> dict[str, float]:
    """As the plan has them, by group. It charges tables with headers of look-ups, which are counted by themselves: so
    these are taken out as the clock has them, if the two agree on the sum."""
    planned = {group.name: group.forecast.sent_bytes for group in plan.groups}
    look_ups = played.sent_bytes.get(LOOK_UPS, 0.0)
    pulled = [group.name for group in plan.groups if group.layout == "row_sharded"]
    alone = {name: played.sent_bytes.get(name, 0.0) for name in pulled}
    if math.isclose(sum(planned[name] for name in pulled), sum(alone.values()) + look_ups, rel_tol=1e-6):
        planned |= alone
    return {**planned, LOOK_UPS: look_ups}


def _bytes_by_push(plan: Plan, case: Case, steps: range) -> dict[str, float]:
    """A step, by group, in the mean over these steps: of groups whose pushes are not all alike, or seldom."""
    found = {}
    for group in plan.groups:
        if _is_dense(group.exchange):
            exchange = build_dense(group.own_exchange.name, **group.own_exchange.options)
            is_even = exchange.bytes_after is None and exchange.cadence == "step" and not exchange.gradients
            if steps and not is_even:
                facts = [case.profile.parameter(name) for name in group.parameters]
                layout = layout_of(facts, exchange.align, exchange.is_guarded)
                sent = [_sent_in(one, layout, case.topology, steps) for one in crossings(exchange)]
                found[group.name] = sum(sent) / plan.workers / len(steps)
    return found


def _sent_in(exchange: DenseExchange, layout: Layout, topology: Topology, steps: range) -> float:
    """Bytes of all ranks in all of these steps."""
    due = [step + 1 for step in range(steps.stop) if exchange.due(step + 1)]
    pushes = [number for number, step in enumerate(due) if step > steps.start]
    if exchange.bytes_after is None:
        return len(pushes) * sum(exchange.sent_bytes(layout, topology))
    return sum(sum(exchange.bytes_after(layout, topology, number)) for number in pushes)


def _is_dense(choice: Choice | None) -> bool:
    return choice is not None and choice.name in dense_exchanges()


def _decided(plan: Plan) -> frozenset[str]:
    """Groups of which the data decide how much is sent."""
    return frozenset(group.name for group in plan.groups if _is_decided(group.exchange))


def _is_decided(choice: Choice | None) -> bool:
    if choice is None or not _is_dense(choice):
        return False
    exchange = build_dense(choice.name, **choice.options)
    return exchange.most_bytes is not None and exchange.bytes_after is None


@dataclass(frozen=True)
class Quartiles:
    """Seconds of the middle half of steps: first quartile, median, third quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Quartiles":
        if len(seconds) < 2:
            return cls(*(3 * list(seconds) or [0.0, 0.0, 0.0]))
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def nearest(self, seconds: float) -> float:
        return min(max(seconds, self.low), self.high)


@dataclass(frozen=True)
class MeasuredSeconds:
    """groups: requests that are of none go together. edges: of the schedule."""

    groups: Mapping[str, Quartiles]
    edges: Mapping[str, MeasuredEdge]

    def seconds(self, group: str) -> Quartiles:
        return self.groups.get(group, Quartiles.of([]))

    def edge(self, name: str) -> MeasuredEdge:
        return self.edges.get(name, MeasuredEdge({}, 0.0))


def measured_in(trace: Trace, plan: Plan) -> MeasuredSeconds:
    """The steps of the trace are the plan's."""
    names = EdgeLabels(plan)
    edges = measured_edges(trace, plan) if any(map(names.edge_of, trace.groups)) else {}
    steps: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    seldom = {group.name: exchange for group in plan.groups if (exchange := _seldom_pushed(group)) is not None}
    for (label, step), seconds in trace.joint_seconds().items():
        if not names.edge_of(label):
            steps[label if label == STEP else names.group_of(label)][f"step {step}"] += seconds
    for edge, seen in edges.items():
        for at, seconds in seen.seconds.items():
            steps[names.group_of(edge)][at] += seconds
    groups = {group: Quartiles.of([*spent.values()]) for group, spent in steps.items() if group not in seldom}
    for group in seldom.keys() & steps.keys():
        spent = {int(step.removeprefix("step ")): seconds for step, seconds in steps[group].items()}
        groups[group] = Quartiles.of(_between_pushes(seldom[group], spent))
    return MeasuredSeconds(groups, edges)


def _seldom_pushed(group: Group) -> DenseExchange | None:
    """What carries it, where that is not pushed in every step."""
    if group.exchange is None or group.cadence == "step" or group.exchange.name not in dense_exchanges():
        return None
    return build_dense(group.exchange.name, **group.exchange.options)


def _between_pushes(exchange: DenseExchange, spent: Mapping[int, float]) -> list[float]:
    """Seconds of a step, in the mean from one push to the next; of the only one, over a period.

    Args:
        spent: by step, counted as when it was asked.
    """
    pushed = [step for step in sorted(spent) if exchange.due(step)]
    if not pushed:
        return list(spent.values())
    begins = [pushed[0] - exchange.period, *pushed[:-1]][len(pushed) > 1 :]
    ends = pushed[len(pushed) > 1 :]
    return [
        sum(seconds for step, seconds in spent.items() if begin < step <= end) / (end - begin)
        for begin, end in zip(begins, ends, strict=True)
    ]
