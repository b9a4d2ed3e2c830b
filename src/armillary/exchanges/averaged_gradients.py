"""Gradients of a group that carries weights, averaged in steps of their own: what crosses then, and what it costs.

Before its meetings begin such a group may be plain data parallelism (post-local SGD), and between them the ranks of a
node may go on as one (islands). Both are a mean, over all ranks or over those of a node.
"""

from collections.abc import Mapping
from types import MappingProxyType

from armillary.exchanges.all_reduce import all_reduce
from armillary.exchanges.dense import AveragedGradients, DenseExchange, Leg, Mechanisms, PushResult
from armillary.plans.parcel import Layout, Parcel, RankInfo, State, parted
from armillary.plans.requests import AllReduce, Program
from armillary.plans.topology import Topology

__all__ = ["averaging", "crossings", "packed_share"]

ACTS: Mapping[str, str] = MappingProxyType(
    {"world": "gradients averaged over all ranks", "node": "gradients averaged inside the node"}
)


def averaging(asked: AveragedGradients) -> DenseExchange:
    """The exchange that carries them."""

    def mechanisms(layout: Layout, workers: int) -> Mechanisms:
        return {ACTS[asked.scope]: lambda pushed: 1}

    exchange = all_reduce() if asked.scope == "world" else DenseExchange(_node_push, 1, _node_bytes, _node_legs)
    return exchange._replace(due=asked.due, mechanisms=mechanisms)


def _node_push(parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
    """Values are parts of the mean over all ranks, so the sum over a node's is multiplied by the number of nodes."""
    total = yield AllReduce(parcel.joined(), "node")
    result = parted(total, parcel.layout)
    return result.answered(result.values.mul_(place.nodes), result.tail), state


def _node_bytes(layout: Layout, topology: Topology) -> list[float]:
    ranks = topology.workers_per_node
    return [2 * (ranks - 1) / ranks * layout.joined_bytes] * topology.workers


def _node_legs(layout: Layout, topology: Topology) -> list[Leg]:
    messages = 2 * (topology.workers_per_node - 1)
    return [Leg("node", max(_node_bytes(layout, topology)), messages, "AllReduce")]


def crossings(exchange: DenseExchange) -> tuple[DenseExchange, ...]:
    """All that crosses for a group: what its exchange carries, and gradients that are averaged beside it."""
    return exchange, *map(averaging, exchange.gradients)


def packed_share(exchange: DenseExchange) -> float:
    """How often in a step a group is laid side by side: gradients always, weights for their meetings."""
    return 1.0 if exchange.carries == "gradient" else sum(one.share_due for one in crossings(exchange))
