"""Chooses way and mesh by price: every factorisation of the ranks, with FSDP2 on the data axis or without."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from armillary.facts.topology import Topology
from armillary.tensor.cut import examined
from armillary.tensor.groups import is_rank_0, ranks, shared
from armillary.tensor.inventory import Inventory, LinearSeen, looked_at, samples_of, share_of, slowest
from armillary.tensor.price import MeshPrice, StepAsked, priced
from armillary.tensor.ways import WAYS, pieces

__all__ = ["MeshPlan", "plan"]

FORMAT = 1
ALIKE, MOST_ALIKE = 0.02, 0.05  # prices within as much are one price, or within the links' scatter up to the second


@dataclass(frozen=True)
class MeshPlan:
    """Where and how a model is cut; `tensor.cut(model, plan)` carries it out. `choosing` gives another of its rows.

    Args of note:
        fsdp: whether the data axis is to be FSDP2's: `fully_shard(..., mesh=part.mesh["data"])`.
        samples: of a whole step. prices: of all meshes, the cheapest first. inventory: what they were priced from.
    """

    region: str
    way: str
    mesh: Mapping[str, int]
    fsdp: bool
    roles: Mapping[str, str]
    samples: int
    memory_bytes: int | None
    prices: tuple[MeshPrice, ...]
    inventory: Inventory

    def __str__(self) -> str:
        lines = [
            f"tensor: region {self.region!r}, {self.samples} samples a step; taken: {_named(self)}",
            "| mesh | ms a step | compute | tensor axes | data axis | MB sent | MB held | fits |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for one in self.prices:
            milliseconds = " | ".join(
                f"{1e3 * seconds:.1f}"
                for seconds in (one.seconds, one.compute_seconds, one.tensor_seconds, one.data_seconds)
            )
            fits = "yes" if _fits(one, self.memory_bytes) else "no"
            lines.append(
                f"| {_named(one)} | {milliseconds} | {one.sent_bytes / 1e6:.1f} | {one.held_bytes / 1e6:.1f} | {fits} |"
            )
        plain = [one for one in self.prices if one.way == "data" and _fits(one, self.memory_bytes)]
        if self.way == "data":
            lines.append("Plain data parallelism wins here.")
        elif plain:
            times = plain[0].seconds / min(one.seconds for one in self.prices if _is(one, self))
            lines.append(f"The cheapest data parallelism would take {times:.2f} times as long.")
        return "\n".join(lines)

    def choosing(self, way: str, mesh: Mapping[str, int], *, fsdp: bool = False) -> "MeshPlan":
        """The same with another mesh."""
        return replace(self, way=way, mesh={"data": 1, **mesh}, fsdp=fsdp)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MeshPlan":
        """
        Raises:
            ValueError: another format. TypeError, KeyError: the text is JSON, but of no plan.
        """
        fields = json.loads(text)
        if fields.pop("format", None) != FORMAT:
            raise ValueError(f'tensor: want a plan of "format": {FORMAT}; plan again')
        seen = fields["inventory"]
        seen["linears"] = tuple(LinearSeen(**one) for one in seen["linears"])
        seen["norms"] = {path: tuple(one) for path, one in seen["norms"].items()}
        seen["region_numbers"] = tuple(seen["region_numbers"])
        fields["inventory"] = Inventory(**seen)
        fields["prices"] = tuple(MeshPrice(**one) for one in fields["prices"])
        return cls(**fields)


def plan(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    region: str,
    topology: Topology,
    memory_bytes: int | None = None,
    optimizer_slots: int = 2,
    roles: Mapping[str, str] | None = None,
) -> MeshPlan:
    """Looks at the model, prices every mesh of the job's ranks, prints them, and takes the cheapest that fits. Every
    rank calls it with the same model and batch, and gets the same plan; model and gradients stay as they were.

    Args:
        batch: of a whole step, all ranks together: tensors whose first dimension are samples. A few of them are passed
            through the model, as many as each rank gets under data parallelism.
        loss: loss(model, batch) -> scalar mean.
        region, roles: as in `cut`.
        topology: what `armillary.measure()` found.
        memory_bytes: that a rank may hold; None: no limit.
        optimizer_slots: numbers that the optimizer keeps for each parameter; 2 is Adam's.

    Raises:
        ValueError: nothing can be cut, or nothing fits.
    """
    many = ranks()
    if topology.workers != many:
        raise ValueError(f"tensor.plan: the topology has {topology.workers} ranks, the job {many}; measure again")
    samples = samples_of(batch)
    found = examined(model, region, "columns_rows", {"tensor": 1}, roles or {})
    looked = looked_at(model, found.chain, share_of(batch, 0, max(1, samples // many)), loss, found.rows_dim)
    told = shared((looked, topology))
    seen, asked = slowest([one for one, _ in told]), StepAsked(samples, told[0][1], optimizer_slots)
    prices = sorted(_all(model, region, roles or {}, seen, asked), key=lambda one: one.seconds)
    fitting = [one for one in prices if _fits(one, memory_bytes)]
    if not fitting:
        least = min(prices, key=lambda one: one.held_bytes)
        raise ValueError(
            f"tensor.plan: no mesh fits {memory_bytes} bytes; the least, {_named(least)}, holds "
            f"{least.held_bytes:.0f}; take smaller batches, or more ranks"
        )
    near = fitting[0].seconds * (1 + min(max(ALIKE, asked.topology.scatter), MOST_ALIKE))
    taken = min((one for one in fitting if one.seconds <= near), key=lambda one: one.held_bytes)
    made = MeshPlan(
        region, taken.way, taken.mesh, taken.fsdp, dict(roles or {}), asked.samples, memory_bytes, tuple(prices), seen
    )
    if is_rank_0():
        print(made)
    return made


def _all(
    model: nn.Module, region: str, roles: Mapping[str, str], seen: Inventory, asked: StepAsked
) -> Iterator[MeshPrice]:
    """What can be cut, and has samples and tokens for all its pieces."""
    for way, sizes in _meshes(ranks()):
        if asked.samples % sizes["data"]:
            continue
        try:
            found = examined(model, region, way, sizes, roles)
        except ValueError:
            continue
        rule = WAYS[way]
        is_short = asked.samples // sizes["data"] < pieces(sizes, rule.rows) or seen.tokens < pieces(sizes, rule.tokens)
        if is_short or (rule.tokens and not seen.heads) or seen.heads % pieces(sizes, rule.cuts_heads):
            continue
        for fsdp in (False, True) if sizes["data"] > 1 else (False,):
            yield priced(seen, way, sizes, found.all_roles, step=asked, fsdp=fsdp)


def _meshes(many: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Every way and every mesh of so many ranks, the data axis first."""
    for data in range(1, many + 1):
        left, rest = divmod(many, data)
        if rest:
            continue
        if left == 1:
            yield "data", {"data": data}
            continue
        for way, rule in WAYS.items():
            if len(rule.axes) == 1:
                yield way, {"data": data, rule.axes[0]: left}
            elif rule.axes:
                square = [name for name in rule.axes if name != "depth"]
                for q in range(2, left + 1):
                    depth, odd = divmod(left, q ** len(square))
                    if not odd and depth and (depth > 1) == ("depth" in rule.axes):
                        yield way, {"data": data, **{name: depth if name == "depth" else q for name in rule.axes}}


def _fits(one: MeshPrice, memory_bytes: int | None) -> bool:
    return memory_bytes is None or one.held_bytes <= memory_bytes


def _is(one: MeshPrice, plan: MeshPlan) -> bool:
    return (one.way, dict(one.mesh), one.fsdp) == (plan.way, dict(plan.mesh), plan.fsdp)


def _named(one: MeshPlan | MeshPrice) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in one.mesh.items() if size > 1)
    return f"{one.way} ({sizes or 'one rank'}){' with FSDP2' if one.fsdp else ''}"
