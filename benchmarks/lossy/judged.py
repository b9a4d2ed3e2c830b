"""How good a model is on held-out data: the metric of its workload on the first batches, or on all."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from armillary.session.workload import Batch, Workload

__all__ = ["held_out", "judged"]

BATCHES = 40


def held_out(workload: Workload, batches: int | None = BATCHES) -> list[Batch]:
    """The same for every contender and seed. batches: at most; None: all that there are."""
    return list(islice(workload.batches("held_out", 0, 1, 0), batches))


def judged(workload: Workload, model: nn.Module, batches: Sequence[Batch], metric: str) -> float:
    totals: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            for name, value in workload.evaluate(model, batch).items():
                totals[name] = totals.get(name, 0.0) + value
    model.train()
    return float(workload.report(totals)[metric])
