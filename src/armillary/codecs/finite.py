"""Whether all numbers of a tensor are finite: what is not must move no state, so every push and every letter asks.

By the smallest and the largest, both of which are not a number where any is: one pass. `isfinite().all()` took fifteen
times as long, 6 ms of two million numbers, a sixth of a low-rank push.
"""

import torch
from torch import Tensor

__all__ = ["all_finite"]


def all_finite(values: Tensor) -> Tensor:
    """() bool. values: dense, of any shape; of none it is True."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, most = (torch.view_as_real(values) if values.is_complex() else values).aminmax()
    return least.isfinite() & most.isfinite()
