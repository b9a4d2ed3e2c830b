"""The plan of a loop's first steps, which are watched: nobody knows yet how its model reads.

Everything is whole on every worker, as in plain data parallelism, but large tensors send only the rows that some worker
touched: exact for any model.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from armillary.planning.constraints import LISTED, UNKNOWN
from armillary.planning.planner import bucketings
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.request import PlanRequest
from armillary.plans.plan import Mean, Plan
from armillary.plans.profile import ParameterFact, Profile, StageFact
from armillary.plans.topology import TURN_BYTES, Topology
from armillary.plans.units import bytes_text, enough_text

__all__ = ["blank_profile", "is_provisional", "provisional_plan"]

NOTE = "provisional: the first steps of the loop are watched, then a plan is made of what they read"
REASON = "not known yet how it is read"


def blank_profile(parameters: Sequence[ParameterFact], topology: Topology) -> Profile:
    """Of a model of which only its parameters are known."""
    whole = StageFact("", 0, sum(fact.bytes for fact in parameters), 0, 0.0, 0.0)
    return Profile(tuple(parameters), (whole,), topology.workers, topology.workers, topology.workers_per_node)


def provisional_plan(seen: Profile, topology: Topology, mean: Mean, assumptions: Assumptions) -> Plan:
    """
    Args:
        seen: `blank_profile`. topology: its memory is all that a rank may hold, the model too.

    Raises:
        ValueError: whole gradients and optimizer state do not fit beside the model; it names what would.
    """
    trained = [fact for fact in seen.parameters if fact.requires_grad]
    large = [fact for fact in trained if len(fact.shape) > 1 and fact.bytes >= TURN_BYTES]
    wanted = {fact.name: UNKNOWN for fact in large if topology.workers > 1}
    wanted |= {fact.name: LISTED for fact in trained if assumptions.of(fact.name).lists_rows}
    roomy = replace(topology, memory_bytes=sys.maxsize)
    made = bucketings(Case(seen, roomy, assumptions), PlanRequest(wanted, mean=mean))[0]
    frozen = sum(fact.bytes for fact in seen.parameters) - sum(fact.bytes for fact in trained)
    held = made.forecast.memory_bytes
    if frozen + held > topology.memory_bytes:
        raise ValueError(_too_large(trained, large, frozen, held, topology))
    groups = tuple(replace(group, reason=REASON) for group in made.groups)
    return replace(made, groups=groups, notes=(NOTE,), topology_fingerprint=topology.fingerprint)


def _too_large(
    trained: Sequence[ParameterFact], large: Sequence[ParameterFact], frozen: float, held: float, topology: Topology
) -> str:
    """What does not fit, and what would if the plan is made before the first step.

    Args:
        frozen, held: bytes of parameters that are not trained; of those that are, with gradients and optimizer state.
    """
    weights, ranks = sum(fact.bytes for fact in trained), topology.workers
    tables = held * sum(fact.bytes for fact in large) / weights
    names = ", ".join(fact.name for fact in large)
    ways = {
        f"row-wise sharding of {names}, if only rows of them are read": frozen + held - tables * (1 - 1 / ranks),
        "a pipeline by schedule=..., if the model divides evenly into a stage a rank": (frozen + held) / ranks,
    }
    fitting = [f"  {way}: {bytes_text(need)} a rank" for way, need in ways.items() if need <= topology.memory_bytes]
    said = (
        f"parallelize: the first steps would hold the whole model on every worker: {bytes_text(frozen + weights)} of "
        f"parameters, {bytes_text(held - weights)} of gradients and optimizer state; a rank has "
        f"{bytes_text(topology.memory_bytes)}"
    )
    if not fitting:
        return f"{said}; take more ranks, or ranks with {enough_text(frozen + held)} of memory"
    return (
        f"{said}. Before activations, these would do, if batches=... and loss=... are given, so that the plan is made "
        f"before the first step (armillary.advise compares all methods):\n" + "\n".join(fitting)
    )


def is_provisional(plan: Plan) -> bool:
    return NOTE in plan.notes
