"""How many workers own each table, found by timing its exchange in this job before the plan is made.

Parallax relaunches the whole job for every number of partitions it tries (EuroSys 2019, partitioning). Here a trial is
a few look-ups and pushes of as many distinct rows per rank as the profile counted. Rows are drawn evenly, so a trial
does not know that some are read more often than others.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from armillary.exchanges.exchange import RowExchange, build_row
from armillary.exchanges.look_up import LookupRequest, LookupTable, look_up
from armillary.exchanges.owned_rows import merge_rows
from armillary.planning.demand import PRICE
from armillary.planning.partition_search import OwnerSearch, SearchedTable
from armillary.planning.planner import tables_to_search
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.plans.choice import Choice
from armillary.plans.parcel import RankInfo
from armillary.plans.requests import Program
from armillary.transport.agreement import by_rank_zero
from armillary.transport.transport import Transport

__all__ = ["row_seconds", "timed_owners"]

REPETITIONS = 5


def row_seconds(
    transport: Transport, exchange: RowExchange, rows: int, row_numel: int, dtype: torch.dtype, distinct: int
) -> float:
    """Median seconds of one look-up and its push on the slowest rank; every rank must call it and gets the same number.

    Args:
        rows, row_numel, dtype: of the table, on the CPU. distinct: rows one rank reads.
    """
    place = transport.place
    owned = exchange.ownership(rows, place)
    generator = torch.Generator().manual_seed(place.rank)
    drawn = torch.randint(rows, (max(1, distinct),), generator=generator)
    keys = owned.keys(drawn).unique()
    shard = torch.zeros(owned.shard_rows(place.rank), row_numel, dtype=dtype)
    table = LookupTable("trial", exchange, owned, shard)
    taken = []
    for _ in range(REPETITIONS + 1):
        transport.barrier()
        began = time.perf_counter()
        here, sums = transport.complete(_there_and_back(table, keys, place), "trial")
        shard.index_add_(0, *merge_rows(here, sums), alpha=-1.0)
        taken.append(time.perf_counter() - began)
    return transport.agree_largest([statistics.median(taken[1:])])[0]


def _there_and_back(table: LookupTable, keys: torch.Tensor, place: RankInfo) -> Program[Any]:
    outcome = yield from look_up(LookupRequest(0, keys, True, 0), [table], place)
    assert outcome.pulled is not None
    pulled = outcome.pulled
    return (yield from table.exchange.push([pulled.rows], [pulled.route], table.ownership, place))


def timed_owners(transport: Transport, request: PlanRequest, case: Callable[[], Case]) -> dict[str, OwnerSearch]:
    """The searches of the tables whose owners the rule searches, by table; none if the plan is for other machines.
    Every rank must call it, and all get the same.

    Args:
        case: asked on rank 0.

    Raises:
        ValueError: a constraint cannot be honoured.
    """

    def tables() -> tuple[SearchedTable, ...]:
        if request.rule == PRICE:
            return ()
        asked, place = case(), transport.place
        if (asked.topology.workers, asked.topology.workers_per_node) != (place.workers, place.workers_per_node):
            return ()
        return tables_to_search(asked, request)

    return {table.name: _timed(table, transport) for table in by_rank_zero(transport, tables)}


def _timed(table: SearchedTable, transport: Transport) -> OwnerSearch:
    def seconds(way: Choice) -> float:
        exchange = build_row(way.name, **way.options)
        dtype = getattr(torch, table.dtype)
        return row_seconds(transport, exchange, table.rows, table.row_numel, dtype, table.distinct_rows)

    return OwnerSearch(table, table.searched(seconds), is_timed=True)
