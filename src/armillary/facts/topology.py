"""What we run on: nodes, the ranks they hold, the links between ranks, the memory of each. Plain data, JSON both ways.

Two classes of link are told apart, inside a node and between nodes, because the hierarchical exchanges exist for the
difference. A rank's link is what that rank can send at once (its share of the network card).
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Link", "Topology"]


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection: seconds = latency_seconds + bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.latency_seconds >= 0 and self.bytes_per_second > 0):
            raise ValueError(
                f"topology: a link needs latency_seconds >= 0 and bytes_per_second > 0, got {self.latency_seconds} "
                f"and {self.bytes_per_second}"
            )

    def seconds(self, sent_bytes: float, messages: float = 1) -> float:
        """Time of `messages` dependent messages that carry `sent_bytes` in all."""
        return messages * self.latency_seconds + sent_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `workers_per_node` ranks each; ranks are numbered node by node.

    Args of note:
        inside: link between two ranks of a node; between: link between ranks of different nodes.
        memory_bytes: what one rank may hold. backend: "gloo" or "nccl"; they are priced as different machines.
    """

    nodes: int
    workers_per_node: int
    inside: Link
    between: Link
    memory_bytes: int
    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.workers_per_node < 1:
            raise ValueError(
                f"topology: want at least one node of one worker, got {self.nodes} x {self.workers_per_node}"
            )
        if self.memory_bytes <= 0:
            raise ValueError(f"topology: memory_bytes must be positive, got {self.memory_bytes}")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def link(self) -> Link:
        """The slowest link a message to a random rank may cross."""
        return self.between if self.nodes > 1 else self.inside

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    def node_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node that holds `rank`."""
        first = self.node_of(rank) * self.workers_per_node
        return tuple(range(first, first + self.workers_per_node))

    def rail_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place as `rank` in every node."""
        return tuple(range(rank % self.workers_per_node, self.workers, self.workers_per_node))

    @property
    def fingerprint(self) -> str:
        """Eight hex digits of what a plan depends on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        fields = json.loads(text)
        return cls(**{**fields, "inside": Link(**fields["inside"]), "between": Link(**fields["between"])})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Topology":
        return cls.from_json(Path(path).read_text())
