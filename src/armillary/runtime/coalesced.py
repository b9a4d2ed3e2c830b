"""Several all-to-alls made as one: what goes to a rank travels together, as bytes.

A message costs a processor as much as many kilobytes do (a notice that the receiver is ready, the send, threads that
wake on both sides), so what leaves at the same moment shares one. The price is a copy of the payload on either side.
Sizes are known to both ends, since those of every part are; nothing is added to the bytes.

Source: Parallax (EuroSys 2019) fuses small dense gradients so; here the rows of several tables.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import AllToAll, Request

__all__ = ["can_coalesce", "coalesced", "parted"]


def can_coalesce(requests: Sequence[Request]) -> bool:
    """Whether these are all-to-alls among the same ranks and on one device, and more than one."""
    kinds = {(type(request), request.scope, request.tensor.device) for request in requests}
    return len(requests) > 1 and len(kinds) == 1 and isinstance(requests[0], AllToAll)


def coalesced(requests: Sequence[AllToAll]) -> AllToAll:
    """One request, in which the pieces for each rank stand one after another in the order of the requests."""
    sent, received = _sizes(requests, "send"), _sizes(requests, "receive")
    pieces = [_bytes_of(one.tensor).split_with_sizes(sizes) for one, sizes in zip(requests, sent, strict=True)]
    together = [piece for of_a_rank in zip(*pieces, strict=True) for piece in of_a_rank]
    send, receive = (tuple(map(sum, zip(*lists, strict=True))) for lists in (sent, received))
    return AllToAll(torch.cat(together), send, receive, requests[0].scope)


def parted(requests: Sequence[AllToAll], answer: Tensor) -> list[Tensor]:
    """What each of the requests would have been answered alone.

    Args:
        answer: (bytes,) uint8, that to `coalesced` of the same requests.
    """
    received = _sizes(requests, "receive")
    pieces = answer.split_with_sizes([size for of_a_rank in zip(*received, strict=True) for size in of_a_rank])
    found = []
    for number, one in enumerate(requests):
        mine = torch.cat(pieces[number :: len(requests)])  # a tensor of its own: views of a type want aligned bytes
        found.append(mine.view(one.tensor.dtype).view(sum(one.receive), *one.tensor.shape[1:]))
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _sizes(requests: Sequence[AllToAll], side: str) -> list[list[int]]:
    """Of every request, the bytes for or from each rank."""
    found = []
    for one in requests:
        row_bytes = one.tensor.element_size() * math.prod(one.tensor.shape[1:])
        found.append([count * row_bytes for count in getattr(one, side)])
    return found
