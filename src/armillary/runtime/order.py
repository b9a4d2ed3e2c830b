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


def disagreement(everyones: Sequence[Asked], scopes: Sequence[Sequence[int]], names: Sequence[int] = ()) -> str:
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
