"""Every parameter on one owner, whole: the naive parameter server that Parallax is measured against.

Every worker sends its whole gradient to the owner, which answers each of them: 2 w (N - 1) bytes at the owner's link,
2 w at any other. With local aggregation the ranks of a node first add up on the node's aggregator, and only that rank
talks to the owner. It is a baseline: `all_reduce` sends as much in all and never has a hot link.

Source: Parallax (EuroSys 2019), the PS row of the transfer table and the local aggregation of section 4.
Departure: the owner answers with the summed gradient, not the new value; same bytes, same result, and `.grad` is final
on every worker, so clipping works.
"""

from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.dense import DenseExchange, Leg, PushResult
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.parcel import Layout, Parcel, RankInfo, State, parted
from armillary.plans.profile import ParameterFact
from armillary.plans.requests import AllToAll, Program, Scope
from armillary.plans.topology import Topology

__all__ = ["owned_dense"]


def _on_demand(fact: ParameterFact, topology: Topology) -> list[dict[str, Any]]:
    return []


@dense_exchange({}, {"owner": 1}, {"owner": 0, "local_aggregation": True}, offers=_on_demand, owner_option="owner")
def owned_dense(owner: int = 0, local_aggregation: bool = False) -> DenseExchange:
    """
    Args:
        owner: the rank that sums; taken modulo the number of workers.
        local_aggregation: add up inside the node first.

    Raises:
        ValueError: the owner is no number, or another word than True and False.
    """
    if isinstance(owner, bool) or not isinstance(owner, int):
        raise ValueError(f"exchange: owned_dense wants owner as the number of a rank, got {owner!r}")
    if not isinstance(local_aggregation, bool):
        raise ValueError(
            f"exchange: owned_dense wants local_aggregation=True or local_aggregation=False, got {local_aggregation!r}"
        )

    def push(parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        total = yield from everywhere(parcel.joined(), place)
        return parted(total, parcel.layout), state

    def everywhere(flat: Tensor, place: RankInfo) -> Program[Tensor]:
        head = owner % place.workers
        if not local_aggregation:
            total = yield from _sum_at(flat, head, place.rank, place.workers, "world")
            return (yield from _answer_from(total, flat, head, place.rank, place.workers, "world"))
        aggregator, local, across = (
            head % place.workers_per_node,
            place.local_rank,
            head // place.workers_per_node,
        )
        # Every rank makes every request (design law 8); ranks that are no aggregator send nothing across nodes.
        on_rail = place.local_rank == aggregator
        inside = yield from _sum_at(flat, aggregator, local, place.workers_per_node, "node")
        total = yield from _sum_at(inside if on_rail else flat[:0], across, place.node, place.nodes, "rail")
        shape = flat if on_rail else flat[:0]
        answer = yield from _answer_from(total, shape, across, place.node, place.nodes, "rail")
        return (yield from _answer_from(answer, flat, aggregator, local, place.workers_per_node, "node"))

    def sent_bytes(layout: Layout, topology: Topology) -> list[float]:
        head, nbytes = owner % topology.workers, layout.joined_bytes
        if not local_aggregation:
            return [
                float((topology.workers - 1) * nbytes if rank == head else nbytes) for rank in range(topology.workers)
            ]
        sent = []
        for rank in range(topology.workers):
            if rank % topology.workers_per_node != head % topology.workers_per_node:
                sent.append(float(nbytes))
                continue
            peers = topology.workers_per_node - 1
            across = topology.nodes - 1 if rank == head else 1
            sent.append(float((peers + across) * nbytes))
        return sent

    def legs(layout: Layout, topology: Topology) -> list[Leg]:
        nbytes = layout.joined_bytes
        # An owner's link is busy twice: it receives everyone's tensor, then it sends the answers.
        if not local_aggregation:
            return [Leg("slowest", (topology.workers - 1) * nbytes, 1)] * 2
        here = Leg("node", (topology.workers_per_node - 1) * nbytes, 1)
        across = Leg("rail", (topology.nodes - 1) * nbytes, 1)
        return [here, across, across, here]

    return DenseExchange(push, 4 if local_aggregation else 2, sent_bytes, legs)


def _sum_at(flat: Tensor, head: int, me: int, ranks: int, scope: Scope) -> Program[Tensor]:
    """Everyone's `flat` added up on `head`, in rank order; the others get an empty tensor."""
    n = flat.numel()
    send = tuple(n if rank == head != me else 0 for rank in range(ranks))
    receive = tuple(n if me == head != rank else 0 for rank in range(ranks))
    arrived = yield AllToAll(flat if me != head else flat[:0], send, receive, scope)
    if me != head:
        return flat[:0]
    others = list(arrived.split([size for size in receive if size] or [0])) if ranks > 1 else []
    pieces = [*others[:head], flat, *others[head:]]
    return torch.stack(pieces).sum(0)


def _answer_from(total: Tensor, like: Tensor, head: int, me: int, ranks: int, scope: Scope) -> Program[Tensor]:
    """`head`'s tensor on every rank; `like` tells the shape to those who wait for it."""
    n = like.numel()
    send = tuple(n if me == head != rank else 0 for rank in range(ranks))
    receive = tuple(n if rank == head != me else 0 for rank in range(ranks))
    copies = total.repeat(ranks - 1) if me == head else torch.empty(0, dtype=like.dtype, device=like.device)
    arrived = yield AllToAll(copies, send, receive, scope)
    return total if me == head else arrived
