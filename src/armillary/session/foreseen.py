"""What a run of a plan is expected to send and hold, and how long that is in flight: by group, by edge, and of a step.

Seconds are those of the plan played against a clock, since they depend on what hides them. Bytes and memory are the
plan's own. A report in the run and a comparison of its folder afterwards both take these.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from armillary.exchanges.averaged_gradients import crossings
from armillary.exchanges.exchange import DenseExchange, build_dense, dense_exchanges
from armillary.facts.layout import Layout, layout_of
from armillary.facts.plan import Choice, Forecast, Plan
from armillary.facts.topology import Topology
from armillary.planning.pricing import Case
from armillary.planning.simulation import Simulation
from armillary.planning.simulator import LOOK_UPS, simulate
from armillary.planning.staged_clock import ALL_REDUCE
from armillary.schedules.edge import codes_of
from armillary.schedules.registry import options_of, owns_loop
from armillary.session.edge_labels import EdgeLabels
from armillary.session.tally import OTHER

__all__ = ["Foreseen", "foreseen"]


@dataclass(frozen=True)
class Foreseen:
    """By group and by edge, and of the step. decided: where the data decide how much is sent."""

    groups: Mapping[str, Forecast]
    step: Forecast
    edges: Mapping[str, Forecast] = field(default_factory=dict)
    decided: frozenset[str] = frozenset()


def foreseen(plan: Plan, case: Case, steps: range) -> Foreseen:
    """
    Args:
        case: its topology may be of more workers than the plan. steps: that are looked at, counted from the first.

    Raises:
        ValueError: the plan's schedule is not played, or the profile is of another model.
    """
    case = replace(case, topology=case.topology.of(plan.workers))
    held = {group.name: group.forecast for group in plan.groups}
    played = simulate(plan, case)
    if owns_loop(plan.schedule):
        return _by_edge(plan, played)
    sent, flown = _sent_bytes(plan, played) | _bytes_by_push(plan, case, steps), played.in_flight_seconds
    forecast = {name: Forecast(sent[name], one.memory_bytes, flown.get(name, 0.0)) for name, one in held.items()}
    forecast[OTHER] = Forecast(sent[LOOK_UPS], 0.0, flown.get(LOOK_UPS, 0.0))
    step = Forecast(sum(sent.values()), 0.0, played.step_seconds)
    return Foreseen(forecast, step, decided=_decided(plan))


def _by_edge(plan: Plan, played: Simulation) -> Foreseen:
    """Groups as the plan has them, in flight as played; edges as played."""
    names, edges = EdgeLabels(plan), dict[str, Forecast]()
    flown = dict.fromkeys((group.name for group in plan.groups), 0.0)
    for flight in played.flights:
        label = flight.group if flight.action == ALL_REDUCE else f"{flight.action} of {flight.group}"
        flown[names.group_of(label)] += flight.seconds
        if edge := names.edge_of(label):
            edges[edge] = edges.get(edge, Forecast()) + Forecast(flight.sent_bytes, 0.0, flight.seconds)
    groups = {group.name: replace(group.forecast, seconds=flown[group.name]) for group in plan.groups}
    codes = codes_of(options_of(plan).edges)
    decided = frozenset(f"{what} of stage {stage}" for (what, stage), code in codes.items() if not code.is_fixed)
    decided |= {names.group_of(edge) for edge in decided}
    decided |= _decided(plan)
    return Foreseen(groups, Forecast(plan.forecast.sent_bytes, 0.0, played.step_seconds), edges, decided)


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
