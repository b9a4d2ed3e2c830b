"""How a workload would scale: planned and played against a clock for every number of workers, in one process.

The model is profiled here, once; what a step computes stays the same for every number of workers, so the curves say
what the exchanges make of it. More merged rows for more workers follow from Heaps' law (`planning/traffic`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.demand import Constraint
from armillary.planning.planner import plan
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.simulator import simulate
from armillary.runtime.profiling.profiler import profile
from armillary.session.decide import assumptions_of, subject_of
from armillary.session.workload import Workload

__all__ = ["PROFILED_WORKERS", "Curve", "Point", "Scaling", "powers_of_two", "scaling"]

PROFILED_WORKERS = 8
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Point:
    """One number of workers. samples_per_second: of all of them together."""

    workers: int
    step_seconds: float
    exposed_seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Curve:
    """One way to plan, over the numbers of workers."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Scaling:
    """One workload. samples: in one worker's batch. compute_seconds: of one step without any exchange."""

    workload: str
    unit: str
    samples: float
    compute_seconds: float
    profiled_workers: int
    curves: tuple[Curve, ...]


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to `most`."""
    return tuple(1 << power for power in range(most.bit_length()))


def scaling(
    workload: Workload,
    topology: Topology,
    counts: Sequence[int],
    ways: Mapping[str, Mapping[str, Constraint]],
    seed: int = 0,
) -> Scaling:
    """Simulates every way to plan for every number of workers; memory limits are left out.

    Args:
        topology: machines of which there are as many as it takes. counts: numbers of workers.
        ways: to plan, by name: constraints, as in `plan`.

    Raises:
        ValueError: a number of workers that does not fill nodes.
    """
    subject = subject_of(workload, seed)
    batches = list(subject.draw(PROFILED_WORKERS))
    found = profile(subject.model, batches, subject.loss, workers=PROFILED_WORKERS)
    samples = sum(workload.samples(batch) for batch in batches) / len(batches)
    taken, machines = assumptions_of(subject.optimizer, subject.model), replace(topology, memory_bytes=NO_LIMIT)
    curves = []
    for name, constraints in ways.items():
        points = [_point(found, machines.of(count), constraints, taken, samples) for count in counts]
        curves.append(Curve(name, tuple(points)))
    seconds = sum(stage.forward_seconds + stage.backward_seconds for stage in found.stages)
    return Scaling(workload.name, workload.unit, samples, seconds, PROFILED_WORKERS, tuple(curves))


def _point(
    found: Profile, topology: Topology, constraints: Mapping[str, Constraint], taken: Assumptions, samples: float
) -> Point:
    made = plan(found, topology, constraints=constraints, assumptions=taken)
    played = simulate(made, Case(found, topology, taken))
    exposed, seconds = sum(played.exposed_seconds.values()), played.step_seconds
    return Point(topology.workers, seconds, exposed, samples * topology.workers / seconds)
