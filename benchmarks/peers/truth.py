"""What every contender must compute: plain PyTorch in one process, over the batches of all workers, gradients averaged.

Departure of each contender from it is taken at the last step of each turn, where all earlier updates are in the loss.
"""

from itertools import islice

import torch

from benchmarks.peers.case import Case


def losses(case: Case, workers: int, steps: int) -> list[float]:
    """Of rank 0's batch before each update."""
    model = case.sparse_model()
    optimizer = case.unfused_optimizer(model.parameters())
    drawn = [islice(case.draw(rank), steps) for rank in range(workers)]
    found = []
    for together in zip(*drawn, strict=True):
        values = [case.loss(model, batch) for batch in together]
        found.append(float(values[0].detach()))
        torch.stack(values).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def departure(loss: float, truth: float) -> float:
    """Relative to the truth."""
    return abs(loss - truth) / abs(truth)
