"""The grid: workloads, numbers of workers and links; a cell is one of each.

Workloads are small, so that eight ranks fit on two cores, and differ in what decides: two tables of which a few rows
are read (language_model), tables beside dense parameters of the same size (translation), a wide table of which hardly
anything is read (recommender), none at all (vision).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SPEEDS", "WORKERS", "WORKLOADS", "Cell", "grid"]

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


@dataclass(frozen=True)
class Cell:
    """One of each."""

    workload: str
    workers: int
    mbit_per_second: float

    @property
    def name(self) -> str:
        return f"{self.workload}_{self.workers}_{self.speed.replace(' ', '')}"

    @property
    def speed(self) -> str:
        return f"{self.mbit_per_second:g} Mbit" if self.mbit_per_second else "unshaped"


def grid() -> tuple[Cell, ...]:
    """All cells, the quickest to measure first."""
    return tuple(Cell(name, count, speed) for count in WORKERS for speed in SPEEDS[::-1] for name in WORKLOADS)
