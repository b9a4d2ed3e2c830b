"""The plan of a run that does not know yet how its model reads: everything is whole on every worker, as in plain data
parallelism, but large tensors send only the rows that some worker touched. Exact for any model."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Mean, Plan
from armillary.facts.profile import Profile
from armillary.facts.profile_table import bytes_text
from armillary.facts.stage import StageFact
from armillary.facts.topology import TURN_BYTES, Topology
from armillary.planning.parallax import LISTED, UNKNOWN
from armillary.planning.planner import bucketings
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.request import PlanRequest

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
        ValueError: whole gradients and optimizer state do not fit beside the model.
    """
    trained = [fact for fact in seen.parameters if fact.requires_grad]
    large = [fact for fact in trained if len(fact.shape) > 1 and fact.bytes >= TURN_BYTES]
    wanted = {fact.name: UNKNOWN for fact in large if topology.workers > 1}
    wanted |= {fact.name: LISTED for fact in trained if assumptions.of(fact.name).lists_rows}
    roomy = replace(topology, memory_bytes=sys.maxsize)
    made = bucketings(Case(seen, roomy, assumptions), PlanRequest(wanted, mean=mean))[0]
    weights = sum(fact.bytes for fact in trained)
    more = made.forecast.memory_bytes - weights
    room = topology.memory_bytes - sum(fact.bytes for fact in seen.parameters)
    if more > room:
        raise ValueError(
            f"parallelize: the first steps would hold the whole model on every worker: {bytes_text(weights)} of "
            f"parameters, and {bytes_text(more)} of gradients and optimizer state, of which "
            f"{bytes_text(max(0, room))} are free; give batches=..., loss=...: then the plan is made, and "
            "tables are spread, before the first step"
        )
    groups = tuple(replace(group, reason=REASON) for group in made.groups)
    return replace(made, groups=groups, notes=(NOTE,), topology_fingerprint=topology.fingerprint)


def is_provisional(plan: Plan) -> bool:
    return NOTE in plan.notes
