"""What numbers a part can hand on at all, found by running it: a ReLU gives none below 0, a tanh none beyond 1.

A copy runs with random weights of growing scale. What it does not give then, no training makes it give.
"""

import copy
from typing import Any

import torch
from torch import nn

__all__ = ["refuse_out_of_range"]

SCALES, TRIALS = (1.0, 30.0, 1e3, 1e5), 4


def refuse_out_of_range(part: int, module: nn.Module, given: tuple[Any, ...], kappa: float) -> None:
    """
    Args:
        given: an example of what the part reads.
        kappa: codes lie between 0 and this.

    Raises:
        ValueError: the part cannot give all of these numbers.
    """
    low, high = float("inf"), float("-inf")
    wanted_low, wanted_high = min(0.0, kappa), max(0.0, kappa)
    tried = copy.deepcopy(module)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for scale in SCALES:
            for _ in range(TRIALS):
                for weight in tried.parameters():
                    weight.copy_(scale * torch.randn(weight.shape, generator=draw))
                found = tried(*given).nan_to_num(nan=0.0)
                low, high = min(low, float(found.min())), max(high, float(found.max()))
            if low <= wanted_low and wanted_high <= high:
                return
    raise ValueError(
        f"local_losses: part {part} gives numbers from {low:.3g} to {high:.3g}, whatever its weights, and codes lie "
        f"from {wanted_low:g} to {wanted_high:g}; take another kappa, or cut before its last activation"
    )
