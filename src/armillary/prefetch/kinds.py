"""Which kind of prefetch a plan wants: the one place that knows all there are."""

from collections.abc import Sequence

from armillary.plans.plan import Plan
from armillary.prefetch.batches import WATCHED_DRAWS
from armillary.prefetch.prefetcher import DEPTH, Prefetcher
from armillary.tables.lookups import NoPrefetch, Prefetch
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = ["prefetch_of", "steps_to_learn"]


def prefetch_of(plan: Plan, tables: Sequence[RowTable], transport: Transport) -> Prefetch:
    """For these tables of the plan, in launch order."""
    kinds = {group.parameters[0]: group.prefetch for group in plan.groups if group.prefetch != "none"}
    return Prefetcher([table for table in tables if table.is_pulled], kinds, transport) if kinds else NoPrefetch()


def steps_to_learn(plan: Plan) -> int:
    """Steps of a loop of which nothing is predicted yet."""
    return WATCHED_DRAWS + DEPTH if plan.looks_ahead else 0
