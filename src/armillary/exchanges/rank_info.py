"""Where a rank stands among the others, which is all that an exchange knows of it."""

from dataclasses import dataclass

__all__ = ["RankInfo"]


@dataclass(frozen=True)
class RankInfo:
    """Where a rank stands: its number, how many ranks there are, and how many share its node."""

    rank: int
    workers: int
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.workers or self.workers % self.workers_per_node:
            raise ValueError(f"exchange: no such place: {self}")

    @property
    def node(self) -> int:
        return self.rank // self.workers_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.workers_per_node

    @property
    def nodes(self) -> int:
        return self.workers // self.workers_per_node
