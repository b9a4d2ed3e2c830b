"""In order by the model's own step, which computes only what the last unknown makes new.

It is what a loop over the whole model leaves out: with it, T steps may cost less than one pass in parallel.
"""

import torch
from torch import Tensor

from armillary.solvers.system import Attempt, System

__all__ = ["incremental"]


def incremental(system: System, most_sweeps: int) -> Attempt:
    if system.begin is None:
        raise ValueError("incremental: the model has no step of its own; give it `incremental(samples)`, as Made has")
    step, states = system.begin(), torch.empty_like(system.start)
    last: Tensor | None = None
    for t in range(len(states)):
        last = step(t, last)
        states[t] = last
    return Attempt(states, len(states), len(states))
