"""The grid: workloads, numbers of workers and links; a cell is one of each. And a small one of hosts of two ranks.

Workloads are small, so that eight ranks fit on two cores, and differ in what decides: two tables of which a few rows
are read (language_model), tables beside dense parameters of the same size (translation), a wide table of which hardly
anything is read (recommender), none at all (vision).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HOSTS", "SPEEDS", "WORKERS", "WORKLOADS", "Cell", "grid"]

WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "language_model": {
        "corpus": "synthetic", "vocabulary": 10_000, "width": 64, "hidden": 128, "length": 10, "batch_size": 16,
        "negatives": 512,
    },
    "translation": {"language": "de", "width": 32, "hidden": 64, "batch_size": 8, "longest": 20},
    "recommender": {"data": "latent_factors", "rows": 50_000, "width": 16, "hidden": 384, "batch_size": 64},
    "vision": {"data": "patterns", "norm": "group", "width": 16, "batch_size": 4},
}  # fmt: skip
WORKERS = (2, 4, 8)
SPEEDS = (100.0, 1000.0, 0.0)  # Mbit/s of every link; 0 leaves links unshaped: they are as fast as the processor
HOSTS, RANKS_PER_HOST, HOST_SPEEDS = 3, 2, (1000.0, 300.0)


@dataclass(frozen=True)
class Cell:
    """One of each. Ranks of a host talk over its own memory, which nobody shapes."""

    workload: str
    workers: int
    mbit_per_second: float
    ranks_per_host: int = 1

    @property
    def name(self) -> str:
        placed = f"{self.hosts}x{self.ranks_per_host}" if self.ranks_per_host > 1 else f"{self.workers}"
        return f"{self.workload}_{placed}_{self.speed.replace(' ', '')}"

    @property
    def hosts(self) -> int:
        return self.workers // self.ranks_per_host

    @property
    def speed(self) -> str:
        return f"{self.mbit_per_second:g} Mbit" if self.mbit_per_second else "unshaped"


def grid() -> tuple[Cell, ...]:
    """All cells, the quickest to measure first."""
    alone = [Cell(name, count, speed) for count in WORKERS for speed in SPEEDS[::-1] for name in WORKLOADS]
    shared = [Cell(name, HOSTS * RANKS_PER_HOST, speed, RANKS_PER_HOST) for speed in HOST_SPEEDS for name in WORKLOADS]
    return (*alone, *shared)
