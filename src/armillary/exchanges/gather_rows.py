"""Row-sparse gradients to everyone: every worker's merged rows are gathered by all the others.

Every worker holds the whole table, looks rows up by itself, and updates all of them. Per rank and step u distinct
rows of b bytes cost u (b + 4) (N - 1): better than a dense all-reduce when alpha < 2 / N, worse than `owned_rows` by
N / 2, but nothing is pulled before forward.

Source: the sparse AR row of Parallax's transfer table (EuroSys 2019); Horovod's sparse path, with duplicates merged
first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.dense import Leg, Legs
from armillary.exchanges.exchange import Counts, Pulled, RowExchange, RowTraffic, row_exchange
from armillary.exchanges.owned_rows import ID_BYTES, merge_rows
from armillary.exchanges.ownership import Ownership
from armillary.plans.parcel import RankInfo
from armillary.plans.requests import AllGather, AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["gather_rows"]


COUNT_BYTES = 8


class GatherRoute(NamedTuple):
    """What this rank looked up; nobody else has heard of it."""

    rows: Tensor


@row_exchange()
def gather_rows() -> RowExchange:
    """All-gather of merged rows; uneven, so it travels as an all-to-all with one piece for all (gloo has no uneven
    gather)."""

    def ownership(rows: int, place: RankInfo) -> Ownership:
        return Ownership(rows, (place.rank,), place.workers)  # every rank owns a whole copy

    def pull(
        keys: Tensor, asked: Counts, served: Counts, shard: Tensor, owned: Ownership, place: RankInfo
    ) -> Program[Pulled]:
        yield from ()
        return Pulled(shard.index_select(0, keys), GatherRoute(keys))

    def push(
        gradients: Sequence[Tensor], routes: Sequence[Any], owned: Ownership, place: RankInfo
    ) -> Program[tuple[Tensor, Tensor]]:
        rows, sums = merge_rows(torch.cat([route.rows for route in routes]), torch.cat(list(gradients)))
        counts = tuple((yield AllGather(torch.tensor([len(rows)]))).flatten().tolist())
        send = (len(rows),) * place.workers
        everyones = (yield AllToAll(rows.to(torch.int32).repeat(place.workers), send, counts)).long()
        gathered = yield AllToAll(sums.repeat(place.workers, *[1] * (sums.dim() - 1)), send, counts)
        return merge_rows(everyones, gathered)

    def legs(traffic: RowTraffic, skew: float, topology: Topology) -> Legs:
        others = topology.workers - 1
        counts = Leg("everyone", others * COUNT_BYTES, others, "AllGather")  # they go round
        ids, rows = (others * traffic.distinct_rows * nbytes for nbytes in (ID_BYTES, traffic.row_bytes))
        return Legs((), (counts, Leg("everyone", ids, 1), Leg("everyone", rows, 1)))

    return RowExchange("replicated", ownership, pull, push, 3, legs, 0)
