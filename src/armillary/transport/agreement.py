"""Work that ranks must do or fail together: errors that are kept until all hear, rank 0's work, the same first values.

A rank that leaves a collective conversation half-way leaves the others waiting for ever. Inside `kept` an error is
remembered and the rank goes on taking part; `agree` then raises on every rank, naming the one that failed.
`begin_alike` sends rank 0's model only where ranks differ.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from armillary.transport.transport import Transport

__all__ = ["FirstError", "begin_alike", "by_rank_zero", "checksum"]

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


Result = TypeVar("Result")


def by_rank_zero(transport: Transport, work: Callable[[], Result]) -> Result:
    """The picklable result of `work`, which only rank 0 runs; every rank must call this.

    Raises:
        ValueError: (other ranks) rank 0 failed; with its message. Rank 0 raises what `work` raised.
    """
    if transport.place.rank > 0:
        fine, answer = transport.share(None)[0]
        if not fine:
            raise ValueError(f"rank 0 failed: {answer}")
        result: Result = answer
        return result
    try:
        made = work()
    except Exception as error:
        transport.share((False, str(error)))
        raise
    transport.share((True, made))
    return made


@dataclass(eq=False)
class FirstError:
    """The first error since it was made; for the message, `what` is being done, and what it is `about` once known."""

    what: str
    error: Exception | None = None
    about: str = ""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remembers an error and goes on; what a signal raises (Ctrl-C) is never kept."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def agree(self, transport: Transport, remedy: str = "") -> None:
        """Collective.

        Raises:
            ValueError: some rank met one since this was made; every rank raises, with the first failing rank's words.
            RuntimeError: the same, for any other error.
        """
        mine: tuple[type[Exception], str] | None = None
        about = self.about and f"{self.about}: "
        if isinstance(self.error, ValueError):
            mine = (ValueError, f"{about}{self.error}")
        elif self.error is not None:
            mine = (RuntimeError, f"{about}{type(self.error).__name__}: {self.error}")
        for rank, fault in enumerate(transport.share(mine)):
            if fault is not None:
                kind, text = fault
                raise kind(f"{self.what}: rank {rank}: {text}{remedy and f' ({remedy})'}") from self.error
