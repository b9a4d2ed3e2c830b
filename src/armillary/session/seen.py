"""How long what crossed in the steps of a trace was in flight, by group and by edge: since the last rank had asked.

Steps of a run are not alike: what crosses competes with compute for processors. So of a group there is the middle half
of its steps.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from armillary.facts.plan import Plan
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
    names = EdgeLabels(plan)
    for (label, step), seconds in trace.joint_seconds().items():
        if not names.edge_of(label):
            steps[label if label == STEP else names.group_of(label)][f"step {step}"] += seconds
    for edge, seen in edges.items():
        for at, seconds in seen.seconds.items():
            steps[names.group_of(edge)][at] += seconds
    return Seen({group: Middle.of([*spent.values()]) for group, spent in steps.items()}, edges)
