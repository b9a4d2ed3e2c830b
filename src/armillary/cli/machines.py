"""What is said of the machines of a simulation, and of what is assumed of them."""

from pathlib import Path

from armillary.facts.profile_table import seconds_text
from armillary.facts.topology import Topology
from armillary.planning.pricing import Case

__all__ = ["assumed", "said_of"]


def said_of(topology: Topology, topology_file: Path | None) -> list[str]:
    """What the links are and where that is known from."""
    sides = [("between", topology.between)] if topology.nodes > 1 else []
    sides += [("inside", topology.inside)] if topology.workers_per_node > 1 else []
    speeds = [
        f"{side} nodes {link.bytes_per_second * 8 / 1e9:.3g} Gbit/s and {seconds_text(link.latency_seconds)} a message"
        for side, link in sides or [("inside", topology.inside)]
    ]
    source = "given by hand" if topology_file is None else f"from {topology_file.name}"
    kinds = "each kind of request as measured" if topology.requests else "alike for every kind of request"
    return [
        f"links {source}: {', '.join(speeds)}; {kinds}; whatever their number, workers do not slow one another down"
    ]


def assumed(case: Case) -> list[str]:
    """What a simulated step takes for granted besides links and stages."""
    measured = case.topology.processor is not None
    row = f"index work {case.row_seconds(1024) * 1e6:.2g} us a row of 1 KiB"
    memory = f"whole tensors at {case.memory_bytes_per_second / 1e9:.3g} GB/s"
    slots = sorted(case.by_slots(fact for fact in case.profile.parameters if fact.requires_grad))
    return [
        f"{row}, {memory} ({'measured' if measured else 'round figures'}); optimizer with "
        f"{' or '.join(map(str, slots))} tensors of state",
        f"one request at a time on a link; {case.topology.hidden_share:.0%} of a push can hide behind compute",
        "every worker as busy as the busiest; pulls block, prefetch is not played",
    ]
