"""Short requests in log2 n messages a rank, each of which waits for the one before: a message costs more than they do.

    all-to-all    hop s = 1, 2, 4, ... < n: to the s-th rank after goes whatever has such a hop on its way
    all-reduce    n = 2^k: half of what is left is exchanged with the rank n/2, n/4, ..., 1 away and added up; then the
                  sums go the same way back

A message on gloo is three on the wire (the receiver is ready, the sender is, the data), and for each of them a thread
wakes on the other side. To send one to everybody is two hops instead of 2 log2 n or 4 log2 n, but 7 messages for 3 and
14 for 6 among eight ranks; where these share two cores, a step of 230 ms takes 0.98 of the time (`docs/tables.md`).
An all-reduce sends no more bytes so. An all-to-all does, n/2 log2 n blocks for n - 1: only for very short ones.

Sources: Bruck et al. (1997), index algorithm, and Rabenseifner's halving and doubling, both as MPICH does them for
short messages (Thakur, Rabenseifner and Gropp, 2005).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.exchange import RankInfo

__all__ = ["all_to_all", "can_halve", "halving_all_reduce"]


def all_to_all(tensor: Tensor, group: Any, tag: int, ranks: RankInfo) -> tuple[Callable[[], None], Tensor]:
    """
    Args:
        tensor: (ranks, ...), a block for each, on the host.
        group, tag: a gloo group in which this rank stands at `ranks`, and a tag that is free in it.

    Returns:
        The wait, which has to be called since others depend on what it passes on; and the answer, (ranks, ...), to be
        read after it.
    """
    place, count = ranks.rank, ranks.workers
    blocks = tensor.roll(-place, 0)  # block i has i ranks to go
    moving, receives = _moving(count), []
    arriving = [tensor.new_empty((len(which), *tensor.shape[1:])) for which in moving]
    for hop, into in enumerate(arriving):
        receives.append(group.recv([into], (place - (1 << hop)) % count, tag))
    leaving: list[tuple[Tensor, Any]] = []

    def send(hop: int) -> None:
        piece = blocks.index_select(0, moving[hop])
        leaving.append((piece, group.send([piece], (place + (1 << hop)) % count, tag)))

    send(0)
    answer = torch.empty_like(tensor)

    def wait() -> None:
        for hop, receive in enumerate(receives):
            if hop:
                send(hop)
            receive.wait()
            blocks.index_copy_(0, moving[hop], arriving[hop])
        for _, work in leaving:
            work.wait()
        torch.index_select(blocks, 0, (place - torch.arange(count)) % count, out=answer)

    return wait, answer


@cache
def _moving(count: int) -> tuple[Tensor, ...]:
    """The blocks that move in each hop."""
    return tuple(
        torch.tensor([block for block in range(count) if block >> hop & 1]) for hop in range((count - 1).bit_length())
    )


def can_halve(count: int) -> bool:
    """Whether so many ranks can be halved down to one."""
    return count > 0 and not count & (count - 1)


class _Level(NamedTuple):
    """One halving. keeps, gives: parts of the tensor. addend: the peer's part of what is kept. come, back: receives of
    addend and, on the way back, of what was given; None of nothing."""

    peer: int
    keeps: Tensor
    gives: Tensor
    addend: Tensor
    come: Any
    back: Any


def halving_all_reduce(tensor: Tensor, group: Any, tag: int, ranks: RankInfo) -> Callable[[], None]:
    """What carries the sum over ranks, in place, to its end. The same bits on all ranks: ranks n/2 apart are added
    first. A part is overwritten on the way back when its peer has long taken it: it comes from there.

    Args:
        tensor: on the host, contiguous. group, tag: as in `all_to_all`. ranks: a power of two of them.
    """
    levels = _levels(tensor.view(-1), group, tag, ranks)

    def send(piece: Tensor, peer: int) -> list[Any]:
        return [group.send([piece], peer, tag)] if piece.numel() else []

    def carry() -> None:
        sends = []
        for level in levels:
            sends += send(level.gives, level.peer)
            if level.come is not None:
                level.come.wait()
                level.keeps.add_(level.addend)
        for level in reversed(levels):
            sends += send(level.keeps, level.peer)
            if level.back is not None:
                level.back.wait()
        for work in sends:
            work.wait()

    return carry


def _levels(flat: Tensor, group: Any, tag: int, ranks: RankInfo) -> list[_Level]:
    """The largest halves first, all their receives posted."""

    def receive(into: Tensor, peer: int) -> Any:
        return group.recv([into], peer, tag) if into.numel() else None

    levels = []
    left, reach = (0, ranks.workers), ranks.workers // 2
    while reach:
        halves = [(left[0], left[0] + reach), (left[0] + reach, left[1])]
        if ranks.rank & reach:
            halves.reverse()
        keeps, gives = (
            flat[flat.numel() * first // ranks.workers : flat.numel() * end // ranks.workers] for first, end in halves
        )
        peer, addend = ranks.rank ^ reach, torch.empty_like(keeps)
        levels.append(_Level(peer, keeps, gives, addend, receive(addend, peer), receive(gives, peer)))
        left, reach = halves[0], reach // 2
    return levels
