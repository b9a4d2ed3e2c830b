"""Times one pull and push of a table's rows in the running job, for a number of owners that is being considered.

Rows are drawn at random, as many distinct ones per rank as the profile counted; values do not matter to the time.
"""

import statistics
import time
from typing import Any

import torch

from armillary.exchanges.exchange import RankInfo, RowExchange
from armillary.exchanges.look_up import LookupRequest, LookupTable, look_up
from armillary.exchanges.owned_rows import merge_rows
from armillary.facts.collectives import Program
from armillary.runtime.transport import Transport

__all__ = ["row_seconds"]

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
