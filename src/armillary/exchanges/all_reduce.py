"""Dense gradients summed on every worker by one all-reduce.

Source: data parallelism as in Horovod and DDP; the dense half of Parallax (Kim et al., EuroSys 2019, section 3.1).
"""

from armillary.exchanges.dense import DenseExchange, Leg, PushResult
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.parcel import Layout, Parcel, RankInfo, State, parted
from armillary.plans.requests import AllReduce, Program
from armillary.plans.topology import Topology

__all__ = ["all_reduce"]


@dense_exchange()
def all_reduce() -> DenseExchange:
    """The sum over workers, in one request; 2 (N - 1) / N of the bytes leave each rank, in 2 (N - 1) hops (ring)."""

    def push(parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        total = yield AllReduce(parcel.joined())
        return parted(total, parcel.layout), state

    def sent_bytes(layout: Layout, topology: Topology) -> list[float]:
        return [2 * (topology.workers - 1) / topology.workers * layout.joined_bytes] * topology.workers

    def legs(layout: Layout, topology: Topology) -> list[Leg]:
        return [Leg("neighbour", max(sent_bytes(layout, topology)), 2 * (topology.workers - 1), "AllReduce")]

    return DenseExchange(push, 1, sent_bytes, legs)


@advises("all-reduce (DDP)", "every gradient whole, in buckets", "methods/hybrid.md")
def _advice(situation: Situation) -> Advice:
    return planned(situation, "what DDP does", "--exchange 'all_reduce=*'", {"*": "all_reduce"})
