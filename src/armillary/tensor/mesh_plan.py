"""Where and how a model is cut, with what every mesh was expected to cost; it prints, goes to JSON and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from armillary.tensor.inventory import Inventory

__all__ = ["MeshPlan", "MeshPrice", "named"]

FORMAT = 2


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

    @property
    def name(self) -> str:
        return named(self.way, self.mesh, self.fsdp)

    def fits(self, memory_bytes: int | None) -> bool:
        return memory_bytes is None or self.held_bytes <= memory_bytes


@dataclass(frozen=True)
class MeshPlan:
    """Where and how a model is cut; `tensor.cut(model, plan)` carries it out. `choosing` gives another of its rows.

    Args of note:
        fsdp: whether the data axis is to be FSDP2's: `fully_shard(..., mesh=part.mesh["data"])`.
        samples: of a whole step. prices: of all meshes, the cheapest first. inventory: what they were priced from.
        left_out: meshes that the model does not allow, and why.
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
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        lines = [
            f"tensor: region {self.region!r}, {self.samples} samples a step; taken: {self.name}",
            "| mesh | ms a step | compute | tensor axes | data axis | MB sent | MB held | fits |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for one in self.prices:
            milliseconds = " | ".join(
                f"{1e3 * seconds:.1f}"
                for seconds in (one.seconds, one.compute_seconds, one.tensor_seconds, one.data_seconds)
            )
            fits = "yes" if one.fits(self.memory_bytes) else "no"
            lines.append(
                f"| {one.name} | {milliseconds} | {one.sent_bytes / 1e6:.1f} | {one.held_bytes / 1e6:.1f} | {fits} |"
            )
        plain = [one for one in self.prices if one.way == "data" and one.fits(self.memory_bytes)]
        if self.way == "data":
            lines.append("Plain data parallelism wins here.")
        elif plain:
            times = plain[0].seconds / next(one.seconds for one in self.prices if one.name == self.name)
            lines.append(f"The cheapest data parallelism would take {times:.2f} times as long.")
        lines += [f"Not possible: {name}: {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)

    @property
    def name(self) -> str:
        return named(self.way, self.mesh, self.fsdp)

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
        fields["inventory"] = Inventory(**fields["inventory"])
        fields["prices"] = tuple(MeshPrice(**one) for one in fields["prices"])
        return cls(**fields)


def named(way: str, mesh: Mapping[str, int], fsdp: bool = False) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)
    return f"{way} ({sizes or 'one rank'}){' with FSDP2' if fsdp else ''}"
