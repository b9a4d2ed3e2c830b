"""Dense gradients summed on every worker by one all-reduce.

Source: data parallelism as in Horovod and DDP; the dense half of Parallax (Kim et al., EuroSys 2019, section 3.1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.exchanges.exchange import DenseExchange, Place, dense_exchange
from armillary.exchanges.leg import Leg
from armillary.facts.collectives import AllReduce, Program
from armillary.facts.topology import Topology

__all__ = ["all_reduce"]


@dense_exchange()
def all_reduce() -> DenseExchange:
    """The sum over workers, in one request; 2 (N - 1) / N of the bytes leave each rank, in 2 (N - 1) hops (ring)."""

    def push(flat: Tensor, place: Place) -> Program[Tensor]:
        total: Tensor = yield AllReduce(flat)
        return total

    def sent_bytes(nbytes: int, topology: Topology) -> list[float]:
        return [2 * (topology.workers - 1) / topology.workers * nbytes] * topology.workers

    def legs(nbytes: int, topology: Topology) -> list[Leg]:
        return [Leg("slowest", max(sent_bytes(nbytes, topology)), 2 * (topology.workers - 1), "AllReduce")]

    def oracle(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors)).sum(0)] * len(tensors)

    return DenseExchange(push, 1, sent_bytes, legs, oracle)
