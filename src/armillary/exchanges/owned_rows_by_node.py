"""Owned rows with local aggregation: requests and gradients are merged inside a node before they cross nodes.

An id whose owner is local rank l of node m goes first to local rank l of the *asker's* node, which merges what its node
wants and asks on along the rail (the ranks l of all nodes). Rows come back, and gradients leave, the same two hops;
no rank is a hot aggregator. Across nodes each distinct row of a node crosses once, however many of its workers read
it.

Source: Parallax (EuroSys 2019), local aggregation, there on one chief per machine; the two hops are those of
hierarchical all-to-alls (for example HetuMoE, 2022).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.dense import Leg, Legs, Links
from armillary.exchanges.exchange import Counts, Pulled, RowExchange, RowTraffic, row_exchange
from armillary.exchanges.owned_rows import ID_BYTES, by_rank, merge_rows
from armillary.exchanges.ownership import Ownership, orders
from armillary.plans.parcel import RankInfo
from armillary.plans.profile import ParameterFact
from armillary.plans.requests import AllToAll, Program, Scope
from armillary.plans.topology import Topology

__all__ = ["owned_rows_by_node"]

COUNT_BYTES = 8


class NodeRoute(NamedTuple):
    """One look-up in two hops; `order` puts the asker's keys in hop order, `slots` expands merged keys to who asked."""

    order: Tensor  # (u,) positions of the sorted keys, grouped by local rank
    near_asked: Counts
    near_served: Counts
    slots: Tensor  # (sum(near_served),) index into the merged keys
    far_asked: Counts
    far_served: Counts
    served_rows: Tensor  # (sum(far_served),) local rows of the shard


def _offers(fact: ParameterFact, topology: Topology) -> list[dict[str, Any]]:
    """Where there are two hops to make."""
    assert fact.rows is not None, fact
    dealt = [{} if order == "modulo" else {"order": order} for order in orders(fact.rows)]
    return dealt if topology.nodes > 1 and topology.workers_per_node > 1 else []


@row_exchange({}, {"order": "hashed"}, offers=_offers)
def owned_rows_by_node(order: str = "modulo") -> RowExchange:
    """Rows dealt to all workers; see `Ownership` for `order`."""

    def ownership(rows: int, place: RankInfo) -> Ownership:
        return Ownership(rows, tuple(range(place.workers)), place.workers, order)  # type: ignore[arg-type]

    def pull(
        keys: Tensor, asked: Counts, served: Counts, shard: Tensor, owned: Ownership, place: RankInfo
    ) -> Program[Pulled]:
        owner = torch.div(keys, owned.capacity, rounding_mode="floor")
        local_rank = owner % place.workers_per_node
        hop_order = torch.argsort(local_rank, stable=True)
        near_asked = tuple(torch.bincount(local_rank, minlength=place.workers_per_node).tolist())
        near_served = yield from _counts(near_asked, "node")
        arrived = (yield AllToAll(keys[hop_order].to(torch.int32), near_asked, near_served, "node")).long()
        merged, slots = torch.unique(arrived, return_inverse=True)
        # merged is sorted by owner, and all owners are on this rank's rail: so it is sorted by node.
        node = torch.div(merged, owned.capacity * place.workers_per_node, rounding_mode="floor")
        far_asked = tuple(torch.bincount(node, minlength=place.nodes).tolist())
        far_served = yield from _counts(far_asked, "rail")
        local = (merged % owned.capacity).to(torch.int32)
        wanted = (yield AllToAll(local, far_asked, far_served, "rail")).long()
        rows = yield AllToAll(shard.index_select(0, wanted), far_served, far_asked, "rail")
        near = yield AllToAll(rows.index_select(0, slots), near_served, near_asked, "node")
        answer = torch.empty_like(near)
        answer[hop_order] = near
        return Pulled(answer, NodeRoute(hop_order, near_asked, near_served, slots, far_asked, far_served, wanted))

    def push(
        gradients: Sequence[Tensor], routes: Sequence[Any], owned: Ownership, place: RankInfo
    ) -> Program[tuple[Tensor, Tensor]]:
        ordered = [gradient[route.order] for gradient, route in zip(gradients, routes, strict=True)]
        payload, send = by_rank([route.near_asked for route in routes], ordered)
        arrived = yield AllToAll(payload, send, _total(route.near_served for route in routes), "node")
        # Give each look-up its own rows back, and merge them as its pull did.
        by_route = _by_route(arrived, [route.near_served for route in routes])
        merged = [_merge(rows, route) for rows, route in zip(by_route, routes, strict=True)]
        payload, send = by_rank([route.far_asked for route in routes], merged)
        arrived = yield AllToAll(payload, send, _total(route.far_served for route in routes), "rail")
        rows, _ = by_rank([route.far_served for route in routes], [route.served_rows for route in routes])
        return merge_rows(rows, arrived)

    def legs(traffic: RowTraffic, skew: float, topology: Topology) -> Legs:
        """Per look-up and hop: counts, ids, rows."""
        here, nodes = topology.workers_per_node, topology.nodes
        hops: list[tuple[Links, int, float]] = [
            ("node", here, traffic.distinct_rows * (here - 1) / here),
            ("rail", nodes, traffic.node_rows / here * (nodes - 1) / nodes),
        ]
        pull, push = [], []
        for links, ranks, rows in hops:
            counts = traffic.lookups * COUNT_BYTES * (ranks - 1)
            asked = rows * (traffic.row_bytes + ID_BYTES) + counts
            pull.append(Leg(links, skew * asked, 3 * traffic.lookups))
            push.append(Leg(links, skew * rows * traffic.row_bytes, 1))
        return Legs(tuple(pull), tuple(push))

    return RowExchange("row_sharded", ownership, pull, push, 2, legs, 6)


def _counts(asked: Counts, scope: Scope) -> Program[Counts]:
    ones = (1,) * len(asked)
    return tuple((yield AllToAll(torch.tensor(asked), ones, ones, scope)).tolist())


def _total(sizes: Any) -> Counts:
    return tuple(sum(column) for column in zip(*sizes, strict=True))


def _merge(rows: Tensor, route: NodeRoute) -> Tensor:
    return rows.new_zeros(sum(route.far_asked), *rows.shape[1:]).index_add_(0, route.slots, rows)


def _by_route(joined: Tensor, sizes: Sequence[Counts]) -> list[Tensor]:
    """Undoes `by_rank`: from all pieces of a rank together to one tensor per look-up."""
    ranks, looks = len(sizes[0]), len(sizes)
    pieces = joined.split([sizes[look][rank] for rank in range(ranks) for look in range(looks)])
    return [torch.cat([pieces[rank * looks + look] for rank in range(ranks)]) for look in range(looks)]
