"""Whether what the ranks ask for fits together: the same requests in the same order, splits that add up.

A job that goes wrong here hangs, mixes up answers, or is aborted by the backend without a helpful word; in debug mode
(`check_order`) every request is compared before it is made (design law 8). Numbers are compared; words only travel when
those differ.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.facts.collectives import AllToAll, Request

__all__ = ["AskedRequest", "asked", "disagreement", "in_numbers", "is_doubtful"]


class AskedRequest(NamedTuple):
    """A request as other ranks see it. send, receive: rows for and from each rank of the scope; empty if not uneven."""

    number: int
    text: str
    send: tuple[int, ...]
    receive: tuple[int, ...]


def asked(number: int, label: str, request: Request) -> AskedRequest:
    """The `number`-th request of this rank, made for group `label`."""
    text = f"{label}: {type(request).__name__} in {request.scope}, {request.tensor.dtype}"
    if isinstance(request, AllToAll):
        return AskedRequest(number, f"{text}, rows of {tuple(request.tensor.shape[1:])}", request.send, request.receive)
    return AskedRequest(number, f"{text}, {tuple(request.tensor.shape)}", (), ())


def in_numbers(mine: AskedRequest, ranks: int) -> Tensor:
    """1 + 2 * ranks integers: a hash of what is asked, then the rows for and from each rank; zeros where it is even."""
    digest = blake2b(f"{mine.number} {mine.text}".encode(), digest_size=8).digest()
    rows = [*mine.send, *[0] * (ranks - len(mine.send)), *mine.receive, *[0] * (ranks - len(mine.receive))]
    return torch.tensor([int.from_bytes(digest, signed=True), *rows])


def is_doubtful(everyones: Tensor, scopes: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks' rows of `in_numbers` do not fit together: words must say why. The same on every rank."""
    hashes, ranks = everyones[:, 0], len(everyones)
    send, receive = everyones[:, 1 : 1 + ranks], everyones[:, 1 + ranks :]
    places = [list(ones) for ones in scopes]
    is_fit = all(torch.equal(send[ones, : len(ones)], receive[ones, : len(ones)].T) for ones in places)
    return not (is_fit and bool((hashes == hashes[0]).all()))


def disagreement(everyones: Sequence[AskedRequest], scopes: Sequence[Sequence[int]], names: Sequence[int] = ()) -> str:
    """What does not fit, empty if all does.

    Args:
        everyones: one per rank that asks. scopes: places in it, of each group that the request joins. names: ranks of
            the world that these are; the same, if not said.
    """
    names = names or range(len(everyones))
    if len({(mine.number, mine.text) for mine in everyones}) > 1:
        return "; ".join(f"rank {names[place]} asks #{mine.number} {mine.text}" for place, mine in enumerate(everyones))
    if not everyones[0].send:
        return ""
    for ranks in scopes:
        for place, rank in enumerate(ranks):
            for other, peer in enumerate(ranks):
                sent, wanted = everyones[rank].send[other], everyones[peer].receive[place]
                if sent != wanted:
                    return (
                        f"rank {names[rank]} sends {sent} rows to rank {names[peer]}, which expects {wanted}, in #"
                        f"{everyones[rank].number} {everyones[rank].text}"
                    )
    return ""
