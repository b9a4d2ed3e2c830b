"""What held-out data say of every side's model, in plain PyTorch on rank 0, while no clock runs.

Rank 0 has all cores meanwhile, and links have no limit: whole tables come to it, which is no part of training.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from armillary.session.workload import Workload
from benchmarks.netlab.asking import ask
from benchmarks.parallax.sides import SEED, Side

__all__ = ["Links", "judge"]


@dataclass(frozen=True)
class Links:
    """Of the lab. folder: where answers to what rank 0 asks may lie."""

    mbit_per_second: float
    folder: Path

    @contextmanager
    def opened(self, number: int) -> Iterator[None]:
        """Collective; without a limit inside. number: another one at each call."""
        self._shape(0, f"{number}_opened")
        yield
        self._shape(self.mbit_per_second, f"{number}_shaped")

    def _shape(self, mbit_per_second: float, answer: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            ask(mbit_per_second, self.folder / answer)
        dist.barrier()


def judge(
    sides: Mapping[str, Side], workload: Workload, model: nn.Module, batches: int
) -> dict[str, Mapping[str, float]]:
    """Collective; every rank gets the same.

    Args:
        model: a plain one of the workload, that takes the values of each side in turn.
        batches: of the held-out data, the first ones.
    """
    found: list[dict[str, Mapping[str, float]]] = [{}]
    for name, side in sides.items():
        state = side.plain()
        if dist.get_rank() == 0:
            model.load_state_dict(state)
            found[0][name] = _metrics(workload, model, batches)
    dist.broadcast_object_list(found)
    return found[0]


@torch.no_grad()
def _metrics(workload: Workload, model: nn.Module, batches: int) -> Mapping[str, float]:
    model.eval()
    totals: dict[str, float] = {}
    with _all_cores():
        for batch in islice(workload.batches("held_out", 0, 1, SEED), batches):
            for name, value in workload.evaluate(model, batch).items():
                totals[name] = totals.get(name, 0.0) + value
    return workload.report(totals)


@contextmanager
def _all_cores() -> Iterator[None]:
    """A rank that the lab keeps to one processor leaves it meanwhile: threads that share it wait for each other."""
    kept, every = os.sched_getaffinity(0), os.cpu_count() or 1
    os.sched_setaffinity(0, range(every))
    torch.set_num_threads(every)
    yield
    torch.set_num_threads(1)
    os.sched_setaffinity(0, kept)
