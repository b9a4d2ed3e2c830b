"""By what a sample of a micro-batch is known again: a hash of what the first stage reads of it.

A loop has no numbers for its samples, so the same sample is one whose numbers are the same. A sample that is augmented
at random is another one each time. Every rank of a pipeline is handed the whole micro-batch, so nothing need cross.
"""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["sample_keys"]

KEY_BYTES = 8


def sample_keys(micro_batch: Any) -> tuple[bytes, ...]:
    """One a sample: along the first dimension of what the first stage reads.

    Raises:
        ValueError: its tensors have no first dimension in common.
    """
    leaves = [leaf for leaf in tree_flatten(micro_batch)[0] if isinstance(leaf, Tensor)]
    counts = {len(leaf) if leaf.dim() else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(
            f"edge: samples are told apart along the first dimension of what the first stage reads, and its tensors "
            f"have shapes {shapes}; want the same number of samples in all, or an edge that remembers none"
        )
    hashes = [blake2b(digest_size=KEY_BYTES) for _ in range(counts.pop())]
    for leaf in leaves:
        rows = leaf.detach().cpu().contiguous().reshape(len(leaf), -1).view(torch.uint8).numpy()
        for one, row in zip(hashes, rows, strict=True):
            one.update(row.tobytes())
    return tuple(one.digest() for one in hashes)
