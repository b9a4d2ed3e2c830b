"""How many workers own each table, found by timing its exchange in this job before the plan is made.

Parallax relaunches the whole job for every number of partitions it tries (EuroSys 2019, partitioning); here a trial is
a few look-ups and pushes. Rows are drawn evenly, so a trial does not know that some are read more often than others.
"""

from collections.abc import Callable

import torch

from armillary.exchanges.exchange import build_row
from armillary.facts.plan import Choice
from armillary.planning.owner_search import OwnerSearch, SearchedTable
from armillary.planning.planner import tables_to_search
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.rule import PRICE
from armillary.runtime.hybrid.row_timer import row_seconds
from armillary.runtime.transport import Transport
from armillary.session.rank_zero import by_rank_zero

__all__ = ["timed_owners"]


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
