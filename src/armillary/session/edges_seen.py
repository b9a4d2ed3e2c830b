"""What crossed the edges of a schedule in the steps of a trace, step by step.

A letter is in flight from when both sides had asked to when one of them saw that it was over, as the clock has it
(`planning/staged_clock`). Ranks of different replicas exchange letters of the same names: each replica is a pipeline
of its own, and seconds are the mean over pipelines.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from armillary.facts.plan import Plan
from armillary.facts.trace import Record, Trace
from armillary.schedules.registry import options_of
from armillary.session.edge_labels import EdgeLabels

__all__ = ["SeenEdge", "edges_seen"]


@dataclass(frozen=True)
class SeenEdge:
    """Of one edge. seconds: by step, added up over its letters. sent_bytes: per worker, of the median step."""

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


def edges_seen(trace: Trace, plan: Plan) -> dict[str, SeenEdge]:
    """By edge, of the plan's schedule."""
    edges, pipelines = EdgeLabels(plan), _pipelines(plan)
    seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    sent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pipeline in pipelines:
        for (edge, at), letter in _letters(edges, (trace.ranks[rank] for rank in pipeline)).items():
            step = at.split(",")[0]
            seconds[edge][step] += letter.seconds / len(pipelines)
            sent[edge][step] += letter.sent_bytes / plan.workers
    return {edge: SeenEdge(dict(spent), median(sent[edge].values())) for edge, spent in seconds.items()}


def _pipelines(plan: Plan) -> Sequence[Sequence[int]]:
    """Ranks that exchange letters: of one replica, or all where each holds the whole model."""
    everybody = list(range(plan.workers))
    pipelines = {tuple(plan.mesh.sharing_data(rank)) for rank in everybody}
    workers = options_of(plan).schedule().workers
    return sorted(pipelines) if all(len(pipeline) == workers for pipeline in pipelines) else [everybody]


def _letters(edges: EdgeLabels, ranks: Iterable[Sequence[Record]]) -> dict[tuple[str, str], _Letter]:
    """By edge and which of it; those of which the trace has both sides."""
    found: defaultdict[tuple[str, str], _Letter] = defaultdict(_Letter)
    for records in ranks:
        for one in records:
            if one.at and (edge := edges.edge_of(one.group)):
                found[edge, one.at].take(one)
    return {key: letter for key, letter in found.items() if len(letter.ends) > 1}
