"""Whether what the ranks ask for fits together: the same requests in the same order, splits that add up.

A job that goes wrong here hangs, mixes up answers, or is aborted by the backend without a helpful word; in debug mode
(`check_order`) every request is compared before it is made (design law 8).
"""

from collections.abc import Sequence
from typing import NamedTuple

from armillary.facts.collectives import AllToAll, Request

__all__ = ["Asked", "asked", "disagreement"]


class Asked(NamedTuple):
    """A request as other ranks see it. send, receive: rows for and from each rank of the scope; empty if not uneven."""

    number: int
    text: str
    send: tuple[int, ...]
    receive: tuple[int, ...]


def asked(number: int, label: str, request: Request) -> Asked:
    """The `number`-th request of this rank, made for group `label`."""
    text = f"{label}: {type(request).__name__} in {request.scope}, {request.tensor.dtype}"
    if isinstance(request, AllToAll):
        return Asked(number, f"{text}, rows of {tuple(request.tensor.shape[1:])}", request.send, request.receive)
    return Asked(number, f"{text}, {tuple(request.tensor.shape)}", (), ())


def disagreement(everyones: Sequence[Asked], scopes: Sequence[Sequence[int]]) -> str:
    """What does not fit, empty if all does.

    Args:
        everyones: one per rank of the world. scopes: the ranks of each group that the request joins.
    """
    if len({(mine.number, mine.text) for mine in everyones}) > 1:
        return "; ".join(f"rank {rank} asks #{mine.number} {mine.text}" for rank, mine in enumerate(everyones))
    if not everyones[0].send:
        return ""
    for ranks in scopes:
        for place, rank in enumerate(ranks):
            for other, peer in enumerate(ranks):
                sent, wanted = everyones[rank].send[other], everyones[peer].receive[place]
                if sent != wanted:
                    return (
                        f"rank {rank} sends {sent} rows to rank {peer}, which expects {wanted}, in #"
                        f"{everyones[rank].number} {everyones[rank].text}"
                    )
    return ""
