"""s_t = J_t s_(t-1) + b_t for all t by a parallel scan: neighbours are joined pair by pair, log2 T levels deep.

Blelloch, Prefix Sums and Their Applications, 1990. About 2 T products of matrices, where doubling takes T log2 T.
"""

import torch
from torch import Tensor

__all__ = ["scan"]


def scan(jacobians: Tensor, added: Tensor) -> Tensor:
    """All s_t, where s_(-1) is 0.

    Args:
        jacobians: (T, ..., D, D), or (T, ..., D) for diagonal ones. The first is not read.
        added: (T, ..., D)
    """
    steps = len(added)
    if steps <= 1:
        return added
    even, odd = jacobians[0 : steps - 1 : 2], jacobians[1::2]
    is_diagonal = jacobians.ndim == added.ndim
    joined = odd * even if is_diagonal else odd @ even
    at_odd = scan(joined, _applied(odd, added[0 : steps - 1 : 2]) + added[1::2])
    found = torch.empty_like(added)
    found[1::2] = at_odd
    found[0] = added[0]
    found[2::2] = _applied(jacobians[2::2], at_odd[: (steps - 1) // 2]) + added[2::2]
    return found


def _applied(jacobians: Tensor, states: Tensor) -> Tensor:
    if jacobians.ndim == states.ndim:
        return jacobians * states
    return (jacobians @ states.unsqueeze(-1)).squeeze(-1)
