"""A model's buffers (running statistics, counters): rank 0's reach all ranks once a step, as DDP's do.

Each rank's own batches move them, so without this ranks would evaluate differently, and rank 0's would be saved. Where
rank 0 has run out of data they are those of the first rank that has some. They travel as bytes that one rank fills, so
that whole numbers and the sign of zero arrive as they are.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.facts.collectives import summed
from armillary.runtime.transport import Transport

__all__ = ["LABEL", "BufferPlace", "Buffers", "buffers_of", "write_buffer"]

LABEL = "buffers"


class BufferPlace(NamedTuple):
    """Where a buffer stands, since a module may put another tensor there."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size

    @property
    def there(self) -> Tensor:
        found = self.module._buffers[self.key]
        assert found is not None, self.name
        return found

    @property
    def is_persistent(self) -> bool:
        """Whether it is part of the model's state_dict."""
        return self.key not in self.module._non_persistent_buffers_set


class Buffers:
    """Args:
    is_wanted: False leaves every rank its own.
    """

    def __init__(self, model: nn.Module, transport: Transport, is_wanted: bool = True) -> None:
        self.transport = transport
        is_on = is_wanted and transport.place.workers > 1
        self.places = buffers_of(model) if is_on else []

    @torch.no_grad()
    def spread(self, root: int) -> None:
        """Collective, where there are any; else nothing is done. root: the rank whose they are.

        Raises:
            RuntimeError: a buffer has changed its shape.
        """
        by_device = defaultdict[torch.device, list[tuple[BufferPlace, Tensor]]](list)
        for place in self.places:
            by_device[(buffer := place.there).device].append((place, buffer))
            self._refuse_other_shape(place, buffer)
        is_root = self.transport.place.rank == root
        for pairs in by_device.values():
            mine = [buffer.contiguous().view(-1).view(torch.uint8) for _, buffer in pairs]
            flat = torch.cat(mine) if is_root else mine[0].new_zeros(sum(map(len, mine)))
            theirs = self.transport.complete(summed(flat), LABEL)
            if not is_root:
                for (place, buffer), part in zip(pairs, theirs.split(list(map(len, mine))), strict=True):
                    write_buffer(place, part.clone().view(buffer.dtype).view(buffer.shape))

    def _refuse_other_shape(self, place: BufferPlace, buffer: Tensor) -> None:
        if buffer.shape != place.shape:
            raise RuntimeError(
                f"rank {self.transport.place.rank}: buffer {place.name!r} is {tuple(buffer.shape)} and was "
                f"{tuple(place.shape)} at attach, so ranks cannot share it; say "
                "broadcast_buffers=False to parallelize or attach"
            )


def buffers_of(model: nn.Module) -> list[BufferPlace]:
    """Every buffer once, in the model's order; none that is empty."""
    found: dict[Tensor, BufferPlace] = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.numel():
                found.setdefault(buffer, BufferPlace(f"{path}.{key}" if path else key, module, key, buffer.shape))
    return list(found.values())


def write_buffer(place: BufferPlace, value: Tensor) -> None:
    """Running statistics are no part of a training step's graph, so one that still waits for its backward may go on."""
    buffer = place.there
    if getattr(place.module, "track_running_stats", False):
        buffer.data.copy_(value)
    elif not torch.equal(buffer, value):
        buffer.copy_(value)
