"""What a mesh costs: the requests of one step, its seconds on these links, and the bytes that a rank holds.

Numbers sent are those of each way's paper (`ways.py`); the room's own counters say the same of a step that ran.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from armillary.facts.topology import Side, Topology
from armillary.tensor.inventory import Inventory, LinearSeen
from armillary.tensor.roles import FUSED, WHOLE
from armillary.tensor.ways import WAYS, CutWay, LinearCut, pieces

__all__ = ["MeshPrice", "StepAsked", "forecast_bytes", "priced"]

SPREAD_ALONE = 1 / 4  # of the data axis' seconds, what no backward hides: the last bucket, and the first gather
BACKWARD = 2 / 3  # of a step's compute


@dataclass(frozen=True)
class MeshPrice:
    """One mesh. sent_bytes: by a rank in a step, inside the region. held_bytes: at the peak of a step."""

    way: str
    mesh: Mapping[str, int]
    fsdp: bool
    seconds: float
    compute_seconds: float
    tensor_seconds: float
    data_seconds: float
    sent_bytes: float
    held_bytes: float


@dataclass(frozen=True)
class _Request:
    """A collective of `axis`: numbers that each rank gives to it, and how often a step asks."""

    kind: str
    axis: str
    numbers: float
    times: int = 1


@dataclass(frozen=True)
class _Case:
    """One mesh for one region. samples: of a replica and step."""

    seen: Inventory
    way: CutWay
    sizes: Mapping[str, int]
    roles: Mapping[str, str]
    samples: int

    def size(self, names: tuple[str, ...]) -> int:
        return pieces(self.sizes, names)

    @property
    def rows(self) -> float:
        """Rows of an activation's piece, between blocks: padded samples by padded tokens."""
        samples = math.ceil(self.samples / self.size(self.way.rows))
        return samples * math.ceil(self.seen.tokens / self.size(self.way.tokens))


SENDS: Mapping[str, Callable[[int], float]] = {
    "AllReduce": lambda n: 2 * (n - 1) / n,
    "AllGather": lambda n: n - 1,
    "AllToAll": lambda n: (n - 1) / n,
    "Shift": lambda n: 1,
}
MESSAGES: Mapping[str, Callable[[int], int]] = {
    "AllReduce": lambda n: 2 * (n - 1),
    "AllGather": lambda n: n - 1,
    "AllToAll": lambda n: 1,
    "Shift": lambda n: 1,
}


def _requests(case: _Case) -> Iterator[_Request]:
    seen, way, rows = case.seen, case.way, case.rows
    if not way.axes:
        return
    for linear in seen.linears:
        role = case.roles.get(linear.path, WHOLE)
        if role != WHOLE and way.linears:
            yield from _of_linear(case, linear, way.linears["row" if role == "row" else "column"], role)
    if way.features:
        for sums, parameters in seen.norms.values():
            yield _Request("AllReduce", way.features[0], rows, sums)
            for axis in way.sum_norms:
                yield _Request("AllReduce", axis, seen.width / case.size(way.features), parameters)
    if way.tokens:
        axis, piece = way.tokens[0], rows * seen.width
        many = case.sizes[axis]
        if way.exchanges == "by heads":
            yield _Request("AllToAll", axis, piece, 8 * seen.attentions)
        else:  # keys and values forward, the same and their gradients backward
            yield _Request("Shift", axis, 2 * piece, (2 * (many - 1) + many) * seen.attentions)
        for numbers in seen.region_numbers:
            yield _Request("AllReduce", axis, numbers)
    if way.cuts_activations:
        piece = rows * seen.width / case.size(way.features)
        for axis in reversed((*way.rows, *way.tokens, *way.features)):
            yield _Request("AllGather", axis, piece, 2)
            piece *= case.sizes[axis]


def _of_linear(case: _Case, linear: LinearSeen, rule: LinearCut, role: str) -> Iterator[_Request]:
    if not rule.gather_weight:
        axis = case.way.axes[0]
        if role == "row":
            yield _Request("AllReduce", axis, case.rows * linear.outputs)
        elif linear.reads_anew:
            yield _Request("AllReduce", axis, case.rows * linear.inputs)
        return
    q = case.sizes[rule.gather_x]
    x, y = case.rows * linear.inputs / q, case.rows * linear.outputs / q
    weight = linear.inputs * linear.outputs / case.size(rule.inputs) / case.size(rule.outputs)
    yield _Request("AllGather", rule.gather_x, x, 2)
    yield _Request("AllGather", rule.gather_weight, weight, 2)
    yield _Request("AllToAll", rule.gather_x, x * q)
    yield _Request("AllToAll", rule.gather_weight, weight * q)
    if rule.scatter:
        yield _Request("AllToAll", rule.scatter, y * q)
        yield _Request("AllGather", rule.scatter, y)
    for axis in rule.sum_weight:
        yield _Request("AllReduce", axis, weight)
    for axis in rule.sum_bias:
        if linear.has_bias:
            yield _Request("AllReduce", axis, linear.outputs / case.size(rule.outputs))


def forecast_bytes(
    seen: Inventory, way: str, sizes: Mapping[str, int], roles: Mapping[str, str], samples: int
) -> float:
    """That a rank sends in forward and backward of so many samples of its replica."""
    return _sent_bytes(_Case(seen, WAYS[way], sizes, roles, samples))


def _sent_bytes(case: _Case) -> float:
    numbers = sum(
        one.times * SENDS[one.kind](case.sizes[one.axis]) * one.numbers
        for one in _requests(case)
        if case.sizes[one.axis] > 1
    )
    return numbers * case.seen.number_bytes


def priced(
    seen: Inventory, way: str, sizes: Mapping[str, int], roles: Mapping[str, str], *, step: "StepAsked", fsdp: bool
) -> MeshPrice:
    """One mesh, with FSDP2 on its data axis or without."""
    case = _Case(seen, WAYS[way], sizes, roles, math.ceil(step.samples / sizes["data"]))
    compute = _compute(case)
    tensor = sum(
        one.times * _seconds(step.topology, one, sizes, seen.number_bytes)
        for one in _requests(case)
        if sizes[one.axis] > 1
    )
    numbers = _local_numbers(case)
    data = _data_seconds(case, step.topology, numbers, fsdp)
    exposed = max(data - step.topology.hidden_share * BACKWARD * compute, SPREAD_ALONE * data)
    compute += numbers / (sizes["data"] if fsdp else 1) * seen.update_seconds
    held = _held(case, numbers, step.optimizer_slots, fsdp)
    return MeshPrice(
        way, dict(sizes), fsdp, compute + tensor + exposed, compute, tensor, exposed, _sent_bytes(case), held
    )


@dataclass(frozen=True)
class StepAsked:
    """samples: of all ranks together in a step. optimizer_slots: numbers that the optimizer keeps for each."""

    samples: int
    topology: Topology
    optimizer_slots: int


def _seconds(topology: Topology, one: _Request, sizes: Mapping[str, int], number_bytes: int) -> float:
    n = sizes[one.axis]
    names = list(sizes)
    apart = math.prod(sizes[name] for name in names[names.index(one.axis) + 1 :])  # ranks between neighbours
    side: Side = "inside" if topology.nodes == 1 or apart * n <= topology.workers_per_node else "between"
    link = topology.link_of(one.kind, side)
    sent = SENDS[one.kind](n) * one.numbers * number_bytes
    return topology.beside_seconds(one.kind) + link.seconds(sent, MESSAGES[one.kind](n))


def _compute(case: _Case) -> float:
    """Forward and backward: the region's share of this rank, padding too; what is around it whole."""
    seen, way = case.seen, case.way
    region = seen.region_seconds / seen.samples / seen.tokens
    if way.linears and not way.features:
        cut = seen.cut_share / case.size(way.axes) + (1 - seen.cut_share)
        inside = region * case.rows * cut
    else:
        inside = region * case.rows / case.size(way.features)
    return inside + seen.outside_seconds / seen.samples * case.samples


def _local_numbers(case: _Case) -> float:
    """Parameters that a rank holds, before FSDP2 spreads them."""
    seen, way = case.seen, case.way
    total = float(sum(seen.region_numbers))
    if not way.linears:
        return total + seen.outside_numbers
    if way.features:
        kept = total / case.size(tuple(name for name in way.axes if name != "depth"))
    else:
        cut = sum(one.inputs * one.outputs for one in seen.linears if case.roles.get(one.path, WHOLE) in FUSED)
        kept = total - cut * (1 - 1 / case.size(way.axes))
    return kept + seen.outside_numbers


def _data_seconds(case: _Case, topology: Topology, numbers: float, fsdp: bool) -> float:
    """One all-reduce of all gradients; with FSDP2 one a block, as gloo's reduce-scatter is, and two gathers."""
    if case.sizes["data"] == 1:
        return 0.0
    units = case.seen.blocks + 1 if fsdp else 1
    reduced = _Request("AllReduce", "data", numbers / units)
    gathered = _Request("AllGather", "data", numbers / units / case.sizes["data"])
    asked = [reduced, gathered, gathered] if fsdp else [reduced]
    return units * sum(_seconds(topology, one, case.sizes, case.seen.number_bytes) for one in asked)


def _held(case: _Case, numbers: float, optimizer_slots: int, fsdp: bool) -> float:
    seen, way = case.seen, case.way
    spread = case.sizes["data"] if fsdp else 1
    state = numbers * (2 + optimizer_slots) / spread
    whole, inner = (kept / seen.samples / seen.tokens * case.rows for kept in (seen.whole_bytes, seen.inner_bytes))
    if way.features:
        whole, inner = (kept / case.size(way.features) for kept in (whole, inner))
    elif way.linears:
        inner /= case.size(way.axes)
    around = seen.outside_bytes / seen.samples * case.samples
    gathered = 0.0
    for one in seen.linears if way.features else ():
        rule = way.linears["column"]
        q = case.sizes[rule.gather_x]
        gathered = max(gathered, case.rows * (one.inputs + one.outputs) + one.inputs * one.outputs / q)
    if fsdp:
        gathered += 2 * numbers / (seen.blocks + 1)
    return (state + gathered) * seen.number_bytes + whole + inner + around
