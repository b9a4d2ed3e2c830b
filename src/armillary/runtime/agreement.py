"""Makes every rank begin from the same model: rank 0's, sent only where the ranks differ."""

from collections.abc import Mapping

import torch
from torch import Tensor

from armillary.runtime.transport import Transport

__all__ = ["begin_alike", "checksum"]

BLOCK = 1 << 20


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum of the tensor's bytes, weighted by place, so that permutations differ too."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return 0
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # eight bytes are read as one number only where an eighth one begins
    words = flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64)
    weights = torch.arange(1, min(BLOCK, words.numel() // 8) + 1, dtype=torch.int64) * 2 + 1
    longs = words[: words.numel() // 8 * 8].view(torch.int64)
    for number, block in enumerate(longs.split(BLOCK)):
        total += (block * weights[: len(block)]).sum() * (2 * number + 1)
    total += words[words.numel() // 8 * 8 :].to(torch.int64).sum() * 31
    return int(total)


def _form(tensor: Tensor) -> str:
    """Shape and dtype; strides too where they are not the usual ones, as gradients travel in the order of memory."""
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{strides}"


def begin_alike(tensors: Mapping[str, Tensor], transport: Transport) -> list[str]:
    """Copies rank 0's values to the other ranks where they differ; returns the names that did.

    Raises:
        ValueError: ranks hold tensors of other names, shapes, dtypes or strides; names the first that differ.
    """
    if transport.place.workers == 1:
        return []
    mine = {name: (_form(tensor), checksum(tensor)) for name, tensor in tensors.items()}
    everyones = transport.share(mine)
    for rank, theirs in enumerate(everyones):
        for name in sorted({*theirs, *everyones[0]}):
            if name not in theirs or name not in everyones[0] or theirs[name][0] != everyones[0][name][0]:
                raise ValueError(
                    f"attach: rank {rank} holds {name!r} as {theirs.get(name, ['nothing'])[0]}, rank 0 as "
                    f"{everyones[0].get(name, ['nothing'])[0]}; build the same model on every rank"
                )
    differing = [name for name in tensors if len({theirs[name][1] for theirs in everyones}) > 1]
    for name in differing:
        transport.spread(tensors[name])
    return differing
