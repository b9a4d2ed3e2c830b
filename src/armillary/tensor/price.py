"""What a mesh costs: the seconds of a step on these links, and the bytes that a rank holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from armillary.plans.topology import Side, Topology
from armillary.tensor.dry_run import DryRun
from armillary.tensor.groups import AxisRequest
from armillary.tensor.inventory import Inventory
from armillary.tensor.mesh_plan import MeshPrice
from armillary.tensor.ways import WAYS, pieces

__all__ = ["StepAsked", "priced"]

SPREAD_ALONE = 1 / 4  # of the data axis' seconds, what no backward hides: the last bucket, and the first gather
BACKWARD = 2 / 3  # of a step's compute
MESSAGES: Mapping[str, Callable[[int], int]] = {
    "AllReduce": lambda n: 2 * (n - 1),
    "AllGather": lambda n: n - 1,
    "AllToAll": lambda n: 1,
    "Shift": lambda n: 1,
}


@dataclass(frozen=True)
class StepAsked:
    """samples: of all ranks together in a step. optimizer_slots: numbers that the optimizer keeps for each."""

    samples: int
    topology: Topology
    optimizer_slots: int


def priced(
    seen: Inventory, way: str, sizes: Mapping[str, int], dry: DryRun, step: StepAsked, *, fsdp: bool
) -> MeshPrice:
    """One mesh, with FSDP2 on its data axis or without."""
    spread, samples = sizes["data"] if fsdp else 1, step.samples / sizes["data"]
    numbers, units = dry.numbers + seen.outside_numbers, seen.blocks + 1  # of FSDP2: the blocks, and the rest
    tensor = sum(
        times * _seconds(step.topology, one, axis.name, sizes)
        for axis in dry.axes
        for one, times in axis.requests.items()
    )
    compute = _compute(seen, way, sizes, samples)
    data = _data_seconds(step.topology, sizes, numbers * seen.number_bytes, units if fsdp else 0)
    exposed = max(data - step.topology.hidden_share * BACKWARD * compute, SPREAD_ALONE * data)
    compute += numbers / spread * seen.update_seconds
    state = (2 + step.optimizer_slots) * numbers / spread + (2 * numbers / units if fsdp else 0)
    held = state * seen.number_bytes + dry.peak_bytes + seen.outside_bytes / seen.samples * samples
    return MeshPrice(way, dict(sizes), fsdp, compute + tensor + exposed, compute, tensor, exposed, dry.sent_bytes, held)


def _seconds(topology: Topology, one: AxisRequest, axis: str, sizes: Mapping[str, int]) -> float:
    n, names = sizes[axis], list(sizes)
    apart = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])  # ranks between neighbours
    side: Side = "inside" if topology.nodes == 1 or apart * n <= topology.workers_per_node else "between"
    link = topology.link_of(one.kind, side)
    return topology.beside_seconds(one.kind) + link.seconds(one.sent_bytes(n), MESSAGES[one.kind](n))


def _compute(seen: Inventory, way: str, sizes: Mapping[str, int], samples: float) -> float:
    """Forward and backward: the region's share of this rank, padding too; what is around it whole."""
    rule = WAYS[way]
    rows = math.ceil(samples / pieces(sizes, rule.rows)) * math.ceil(seen.tokens / pieces(sizes, rule.tokens))
    share = 1.0 / pieces(sizes, rule.features)
    if rule.linears and not rule.features:
        share = seen.cut_share / pieces(sizes, rule.axes) + (1 - seen.cut_share)
    inside = seen.region_seconds / seen.samples / seen.tokens * rows * share
    return inside + seen.outside_seconds / seen.samples * samples


def _data_seconds(topology: Topology, sizes: Mapping[str, int], gradient_bytes: float, units: int) -> float:
    """One all-reduce of all gradients; with FSDP2 one a unit, as gloo's reduce-scatter is, and two gathers."""
    if sizes["data"] == 1:
        return 0.0
    unit = gradient_bytes / max(units, 1)
    asked = [AxisRequest("AllReduce", unit), *[AxisRequest("AllGather", unit / sizes["data"])] * (2 if units else 0)]
    return max(units, 1) * sum(_seconds(topology, one, "data", sizes) for one in asked)
