"""Which kind of prefetch a plan wants: the one place that knows all there are."""

from collections.abc import Sequence

from armillary.facts.plan import Plan
from armillary.runtime.hybrid.prefetch import NoPrefetch, Prefetch
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.prefetch.prefetcher import DEPTH, Prefetcher
from armillary.runtime.transport import Transport
from armillary.session.source import WATCHED_DRAWS

__all__ = ["prefetch_of", "steps_to_learn"]


def prefetch_of(plan: Plan, tables: Sequence[RowTable], transport: Transport) -> Prefetch:
    """For these tables of the plan, in launch order."""
    kinds = {group.parameters[0]: group.prefetch for group in plan.groups if group.prefetch != "none"}
    return Prefetcher([table for table in tables if table.is_pulled], kinds, transport) if kinds else NoPrefetch()


def steps_to_learn(plan: Plan) -> int:
    """Steps of a loop of which nothing is predicted yet."""
    return WATCHED_DRAWS + DEPTH if plan.looks_ahead else 0
