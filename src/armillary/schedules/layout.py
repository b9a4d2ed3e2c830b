"""The one layout of what crosses a cut between stages: values and their gradients, row by row, in aligned memory.

Kernels add up in the order in which numbers lie in memory, so the same values in another layout may round otherwise.
Autograd gives a gradient the strides of the kernel that made it; a leaf's `.grad` has the leaf's; what comes over the
wire lies as it was received. Which of them round apart hangs on the processor. So every cut has one layout, whoever
carries it: the one that a message has anyway, since only that is the same on both sides without being told.

Nothing crosses a cut where each worker runs the whole model (rings).
"""

import torch
from torch import Tensor

__all__ = ["plain"]

ALIGNMENT_BYTES = 64  # of what torch's allocator hands out on a host; matrix kernels may round otherwise at another one


def plain(tensor: Tensor) -> Tensor:
    """The same values, the last dimension running fastest; a copy only if they lie otherwise. Sparse ones stay."""
    if tensor.layout != torch.strided:
        return tensor
    rows = tensor.contiguous().view(-1).view(tensor.shape)  # contiguous() alone keeps odd strides of size 1
    return rows if rows.data_ptr() % ALIGNMENT_BYTES == 0 else rows.clone()
