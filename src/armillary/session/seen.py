"""How long what crossed in the steps of a trace was in flight, by group and by edge: since the last rank had asked.

Steps of a run are not alike: what crosses competes with compute for processors. So of a group there is the middle half
of its steps; of one that is not pushed in every step, the mean over each stretch from one push to the next.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from armillary.exchanges.exchange import DenseExchange, build_dense, dense_exchanges
from armillary.facts.plan import Group, Plan
from armillary.facts.trace import Trace
from armillary.schedules.registry import owns_loop
from armillary.session.edge_labels import EdgeLabels
from armillary.session.edges_seen import SeenEdge, edges_seen
from armillary.session.tally import STEP

__all__ = ["Middle", "Seen", "seen_in"]


@dataclass(frozen=True)
class Middle:
    """Seconds of the middle half of steps: first quartile, median, third quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Middle":
        if len(seconds) < 2:
            return cls(*(3 * list(seconds) or [0.0, 0.0, 0.0]))
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def nearest(self, seconds: float) -> float:
        return min(max(seconds, self.low), self.high)


@dataclass(frozen=True)
class Seen:
    """groups: requests that are of none go together. edges: of the schedule."""

    groups: Mapping[str, Middle]
    edges: Mapping[str, SeenEdge]

    def seconds(self, group: str) -> Middle:
        return self.groups.get(group, Middle.of([]))

    def edge(self, name: str) -> SeenEdge:
        return self.edges.get(name, SeenEdge({}, 0.0))


def seen_in(trace: Trace, plan: Plan) -> Seen:
    """The steps of the trace are the plan's."""
    edges = edges_seen(trace, plan) if owns_loop(plan.schedule) else {}
    steps: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    seldom = {group.name: exchange for group in plan.groups if (exchange := _seldom_pushed(group)) is not None}
    names = EdgeLabels(plan)
    for (label, step), seconds in trace.joint_seconds().items():
        if not names.edge_of(label):
            steps[label if label == STEP else names.group_of(label)][f"step {step}"] += seconds
    for edge, seen in edges.items():
        for at, seconds in seen.seconds.items():
            steps[names.group_of(edge)][at] += seconds
    groups = {group: Middle.of([*spent.values()]) for group, spent in steps.items() if group not in seldom}
    for group in seldom.keys() & steps.keys():
        spent = {int(step.removeprefix("step ")): seconds for step, seconds in steps[group].items()}
        groups[group] = Middle.of(_between_pushes(seldom[group], spent))
    return Seen(groups, edges)


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
